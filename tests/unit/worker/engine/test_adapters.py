"""LoRA adapters beside a model: exact tokens, untouched neighbours, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from shared.adapters import load_adapter
from shared.errors import AdapterRefused, InvariantViolated
from tests.adapters import ATTENTION, MLP, make_adapter, merged_model
from tests.engine_driver import page_tables, random_prompt
from tests.reference import Reference
from tests.unit.worker.runners import LoadRunner
from tests.unit.worker.torch_threads import torch_threads

NEW_TOKENS = 12
FORWARDS = ("fused", "portable")


def load_into(runner: ModelRunner, directory: Path) -> str:
    """Have a runner serve the adapter of a directory; its digest."""
    files, weights = load_adapter(directory, 2**24)
    runner.adapters.put(runner.adapters.prepare(files, safetensors.torch.load(weights)))
    return files.digest


class Sequence:
    """One request of an adapter, "" for the base model."""

    def __init__(self, prompt: list[int], pages: np.ndarray, adapter: str) -> None:
        self.prompt, self.tokens, self.pages, self.adapter = len(prompt), list(prompt), pages, adapter
        self.computed = 0
        self.logits: list[torch.Tensor] = []

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


def generate(runner: ModelRunner, sequences: list[Sequence]) -> None:
    """Greedy tokens of all sequences in common steps, prompts in chunks; the first starts a step before the second."""
    started = 1
    while any(len(each.output) < NEW_TOKENS for each in sequences):
        work = [
            (each, min(9, len(each.tokens) - each.computed))
            for each in sequences[:started]
            if len(each.output) < NEW_TOKENS
        ]
        started += 1
        segments = [Segment(rows, each.computed, each.pages, adapter=each.adapter) for each, rows in work]
        meta = ForwardMeta.build(segments, runner.geometry.page_size, "cpu")
        ids = [token for each, rows in work for token in each.tokens[each.computed : each.computed + rows]]
        positions = [place for each, rows in work for place in range(each.computed, each.computed + rows)]
        last = np.cumsum([rows for _, rows in work]) - 1
        logits = runner.forward(torch.tensor(ids), torch.tensor(positions), meta, torch.from_numpy(last))
        for (each, rows), row in zip(work, logits, strict=True):
            each.computed += rows
            if each.computed == len(each.tokens):
                each.logits.append(row.clone())
                each.tokens.append(int(row.argmax()))


def decided(model: Any, seed: int) -> tuple[list[int], list[int]]:
    """A prompt and its greedy answer, which rounding does not decide."""
    reference = Reference(model)
    seeds = iter(range(seed, seed + 1000))
    prompt = reference.decided(lambda: random_prompt(21, next(seeds)), NEW_TOKENS, ignore_eos=True)
    return prompt, reference.greedy(prompt, NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Adapters by family, made once for each set of settings."""
    folder = tmp_path_factory.mktemp("adapters")
    made: dict[str, Path] = {}

    def make(family: str, **settings: Any) -> Path:
        key = repr((family, sorted(settings.items())))
        if key not in made:
            made[key] = make_adapter(checkpoint(family), folder / str(len(made)), **settings)
        return made[key]

    return make


@pytest.mark.parametrize(
    ("family", "forward"),
    [*((family, "fused") for family in ("llama", "llama3", "qwen2", "qwen3", "mistral")), ("llama", "portable")],
)
def test_mixed_batch_gives_the_tokens_of_merged_weights(
    load_runner: LoadRunner, checkpoint: Callable[[str], Path], adapter: Callable[..., Path], family: str, forward: Any
) -> None:
    """The base model and two adapters in common steps each answer as a model with the adapter in its weights does."""
    runner = load_runner(family, forward=forward)
    one = adapter(family, seed=1, targets=(*ATTENTION, *MLP))
    two = adapter(family, seed=2, rank=8, targets=("q_proj", "v_proj"), use_rslora=True)
    models = [checkpoint(family), merged_model(checkpoint(family), one), merged_model(checkpoint(family), two)]
    digests = ["", load_into(runner, one), load_into(runner, two)]
    expected = [decided(model, 100 * number) for number, model in enumerate(models)]
    tables = page_tables(runner, [40] * 3, seed=3)
    sequences = [
        Sequence(prompt, pages, digest) for (prompt, _), pages, digest in zip(expected, tables, digests, strict=True)
    ]

    generate(runner, sequences)

    assert [each.output for each in sequences] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("family", ["gemma2", "opt", "mla"])
def test_other_families_are_adapted(
    load_runner: LoadRunner, checkpoint: Callable[[str], Path], adapter: Callable[..., Path], family: str
) -> None:
    """Families without a fused forward are adapted in the same way."""
    runner = load_runner(family)
    targets = ("q_proj", "k_proj", "out_proj", "down_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    directory = adapter(family, targets=targets)
    prompt, tokens = decided(merged_model(checkpoint(family), directory), 7)
    sequence = Sequence(prompt, page_tables(runner, [40], seed=None)[0], load_into(runner, directory))

    generate(runner, [sequence])

    assert sequence.output == tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_rows_of_the_base_model_keep_their_bits(
    load_runner: LoadRunner, adapter: Callable[..., Path], forward: Any, dtype: str
) -> None:
    """Beside rows of adapters the base model's logits are those that it has alone, and without any adapter loaded."""
    runner = load_runner("llama", forward=forward, dtype=dtype)
    prompt = random_prompt(21, 5)
    tables = page_tables(runner, [40] * 3, seed=1)
    before = Sequence(prompt, tables[0], "")
    generate(runner, [before])
    digest = load_into(runner, adapter("llama"))
    beside = Sequence(prompt, tables[1], "")

    generate(runner, [beside, Sequence(random_prompt(17, 6), tables[2], digest)])

    assert runner.mixes_adapters
    assert torch.equal(torch.stack(before.logits), torch.stack(beside.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_rows_of_an_adapter_do_not_depend_on_their_batch(
    load_runner: LoadRunner, adapter: Callable[..., Path], forward: Any, dtype: str
) -> None:
    """An adapter's logits have the same bits alone and beside the base model and another adapter."""
    runner = load_runner("llama", forward=forward, dtype=dtype)
    digest = load_into(runner, adapter("llama"))
    other = load_into(runner, adapter("llama", seed=9, rank=17, targets=(*ATTENTION, *MLP)))
    tables = page_tables(runner, [40] * 4, seed=1)
    prompt = random_prompt(21, 5)
    alone, beside = Sequence(prompt, tables[0], digest), Sequence(prompt, tables[1], digest)
    generate(runner, [alone])

    generate(runner, [beside, Sequence(random_prompt(13, 1), tables[2], ""), Sequence(prompt, tables[3], other)])

    assert torch.equal(torch.stack(alone.logits), torch.stack(beside.logits))


def test_threads_change_no_bit(load_runner: LoadRunner, adapter: Callable[..., Path]) -> None:
    """Threads share rows where there are few."""
    runner = load_runner("llama", forward="fused")
    digest = load_into(runner, adapter("llama", targets=(*ATTENTION, *MLP)))
    found = []
    for threads in (1, 3, 2):
        sequence = Sequence(random_prompt(21, 5), page_tables(runner, [40], seed=threads)[0], digest)
        with torch_threads(threads):
            generate(runner, [sequence])
        found.append(torch.stack(sequence.logits))

    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_forwards_compute_the_same_terms(
    load_runner: LoadRunner, adapter: Callable[..., Path], dtype: str
) -> None:
    """But for where they round; the terms are as large as what they are added to."""
    folder, prompt = adapter("llama", targets=(*ATTENTION, *MLP)), random_prompt(30, 5)
    found = []
    for forward in FORWARDS:
        runner = load_runner("llama", forward=forward, dtype=dtype)
        digest = load_into(runner, folder)
        pages = page_tables(runner, [30], seed=2)[0]
        for name in ("", digest):
            meta = ForwardMeta.build([Segment(30, 0, pages, adapter=name)], runner.geometry.page_size, "cpu")
            found.append(runner.forward(torch.tensor(prompt), torch.arange(30), meta, torch.arange(30)))
    fused_base, fused, portable_base, portable = found

    rounding = (fused_base - portable_base).abs().mean()
    assert (fused - portable).abs().mean() < 3 * rounding + 1e-5
    assert (fused - fused_base).abs().mean() > 5 * rounding


def test_patterns_give_modules_ranks_and_alphas(
    load_runner: LoadRunner, checkpoint: Callable[[str], Path], adapter: Callable[..., Path]
) -> None:
    """rank_pattern and alpha_pattern count as PEFT has them, and weights of half precision are read."""
    runner = load_runner("llama")
    directory = adapter(
        "llama",
        ranks={"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 6},
        alpha_pattern={"v_proj": 3.0},
        dtype=torch.float16,
    )
    prompt, tokens = decided(merged_model(checkpoint("llama"), directory), 50)
    sequence = Sequence(prompt, page_tables(runner, [40], seed=None)[0], load_into(runner, directory))

    generate(runner, [sequence])

    assert sequence.output == tokens


def test_dropped_adapter_leaves_the_model_as_it_was(load_runner: LoadRunner, adapter: Callable[..., Path]) -> None:
    """Without adapters no module has a hook, and rows of one that is gone are an error."""
    runner = load_runner("llama", forward="portable")
    first, second = (load_into(runner, adapter("llama", seed=seed)) for seed in (1, 2))
    runner.adapters.drop(first)
    hooked = [module for module in runner.model.modules() if module._forward_hooks]
    assert len(hooked) == 12

    runner.adapters.drop(second)

    assert not any(module._forward_hooks for module in runner.model.modules())
    with pytest.raises(InvariantViolated, match="not loaded"):
        runner.adapters.rows_of([Segment(1, 0, np.zeros(1, np.int32), adapter=second)])


def test_layers_that_see_other_rows_are_refused(load_runner: LoadRunner, adapter: Callable[..., Path]) -> None:
    """The head computes the rows that are sampled alone: nobody could say whose they are."""
    runner = load_runner("llama")

    with pytest.raises(AdapterRefused, match="lm_head is not called once for all tokens"):
        load_into(runner, adapter("llama", targets=("q_proj", "lm_head")))

    assert not any(module._forward_hooks for module in runner.model.modules())


def test_an_adapted_expansion_of_latents_is_refused(load_runner: LoadRunner, adapter: Callable[..., Path]) -> None:
    """Latents are attended to by the matrix of the layer that expands them, which is not called and belongs to all."""
    runner = load_runner("mla")

    with pytest.raises(AdapterRefused, match="kv_b_proj is not called once for all tokens"):
        load_into(runner, adapter("mla", targets=("q_b_proj", "kv_b_proj")))


def test_adapters_of_other_models_are_refused(load_runner: LoadRunner, adapter: Callable[..., Path]) -> None:
    """A module that is not there, or has another size, is named."""
    runner = load_runner("llama")

    with pytest.raises(AdapterRefused, match=r"the model has no model\.decoder"):
        load_into(runner, adapter("opt", targets=("q_proj",)))
    with pytest.raises(AdapterRefused, match="q_proj takes 64 numbers and gives 64, the adapter's 64 and 128"):
        load_into(runner, adapter("qwen3", targets=("q_proj",)))


def test_models_whose_steps_call_modules_piece_by_piece_are_refused(
    load_runner: LoadRunner, adapter: Callable[..., Path]
) -> None:
    """A trial outside a step would show nothing of it, so the way in which the model is computed decides."""
    runner = load_runner("bloom")

    with pytest.raises(AdapterRefused, match="it attends by code of its own"):
        load_into(runner, adapter("bloom", targets=("query_key_value",)))
