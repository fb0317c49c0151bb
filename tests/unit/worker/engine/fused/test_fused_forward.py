"""The fused forward computes what the portable path computes, and a request in it never notices the others."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from services.worker.config import WorkerConfig
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.fused import rotations
from services.worker.engine.fused.family import NotOfTheFamily, describe
from services.worker.engine.fused.forward import FusedForward
from services.worker.engine.fused.model import FusedModel
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.model_runner import ModelRunner
from services.worker.native.fused import FusedKernels
from shared.errors import ConfigError, InvariantViolated
from tests.checkpoints import SLIDING_WINDOW, save_checkpoint
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.present import present
from tests.run_name import shm_prefix
from tests.unit.worker.engine.fused.forwards import (
    FAMILIES,
    Watched,
    give_biases,
    hooked_states,
    layers_of,
    logits_of,
)
from tests.unit.worker.torch_threads import torch_threads

LoadRunner = Callable[..., ModelRunner]
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Of logits, relative to their spread."""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    deviation = ((found - expected) / expected.std(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt()
    assert deviation.max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_portable_paths(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Up to rounding, for every row: of chunks of many sizes, after context, behind a window, decoded."""
    prompt = random_prompt(2 * SLIDING_WINDOW + 83, seed=2)
    chunks = [97, 13, 6, 2, *[1] * (len(prompt) - 118)]

    fused = logits_of(load_runner(family, dtype=dtype, forward="fused"), prompt, chunks)
    portable = logits_of(load_runner(family, dtype=dtype, forward="portable"), prompt, chunks)

    assert_near(fused, portable, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_model_may_have_besides_is_computed(dtype: str, tmp_path: Path, load_runner: LoadRunner) -> None:
    """Biases everywhere, tied weights, another width of heads than hidden / heads, an odd number of strips."""
    sizes = {"hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(
        vocab_size=300, num_key_value_heads=3, head_dim=32, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, max_position_embeddings=256, initializer_range=0.2, **sizes,
    )  # fmt: skip
    directory = save_checkpoint(config, tmp_path)
    give_biases(directory)
    results = [logits_of(runner, random_prompt(50, seed=4), [48, 1, 1]) for runner in _both(directory, dtype)]

    assert_near(results[0], results[1], dtype)


def _both(directory: Path, dtype: str) -> Iterator[ModelRunner]:
    for forward in ("fused", "portable"):
        runner = ModelRunner.load(
            directory, dtype=dtype, device="cpu", page_size=16, device_kv_bytes=None, pages=16, threads=0,
            shm_prefix=shm_prefix("engine"), forward=forward,
        )  # fmt: skip
        try:
            yield runner
        finally:
            runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_decoding_request_does_not_notice_its_batch(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Equal to the bit alone, beside 1 to 40 others that decode, and beside long chunks; with any number of threads."""
    runner = load_runner(family, dtype=dtype, forward="fused", tokens=4096)
    tables = page_tables(runner, [48] * 41 + [300], seed=6)
    requests = [Request(random_prompt(30, seed=n), table) for n, table in enumerate(tables[:-1])]
    for request in requests:
        run_step(runner, [(request, 29)])
    chunk = Request(random_prompt(300, seed=99), tables[-1])
    alone = run_step(runner, [(requests[0], 1)])[0]

    for others, beside in [(1, 0), (2, 0), (4, 3), (6, 0), (11, 0), (12, 60), (31, 0), (40, 290)]:
        for count in (1, 2, 3):
            work = [(request, 1) for request in [*requests[1 : others + 1], requests[0]]]
            work += [(chunk, beside)] if beside else []
            for request, _ in work:
                request.computed = 0 if request is chunk else 29
            with torch_threads(count):
                together = run_step(runner, work)[others]
            assert torch.equal(together, alone), (others, beside, count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_does_not_notice_its_step(dtype: str, load_runner: LoadRunner) -> None:
    """The logits and KV of a chunk are equal to the bit alone and among chunks and decode tokens of others."""
    runner = load_runner("qwen3", dtype=dtype, forward="fused")
    tables = page_tables(runner, [130, 200, 40], seed=7)
    ours, long, short = (Request(random_prompt(n, seed=n), t) for n, t in zip((120, 190, 30), tables, strict=True))
    run_step(runner, [(ours, 50)])
    run_step(runner, [(short, 29)])
    alone = run_step(runner, [(ours, 70)])[0]
    kept = runner.pool.tensor[:, :, torch.from_numpy(tables[0]).long()].clone()
    ours.computed = 50

    together = run_step(runner, [(short, 1), (long, 190), (ours, 70)])[2]

    assert torch.equal(together, alone)
    assert torch.equal(runner.pool.tensor[:, :, torch.from_numpy(tables[0]).long()], kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_any_attention_step_gives_the_bits_of_a_paged_one(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """What attends by itself is asked for every layer, with queries, keys and values of its own to keep."""
    runner = load_runner(family, dtype=dtype, forward="fused")
    (table,) = page_tables(runner, [40], seed=8)
    ids, positions = torch.tensor(random_prompt(40, seed=8)), torch.arange(40)
    meta = ForwardMeta.build([Segment(40, 0, table)], 16, "cpu")
    runner.pool.tensor.zero_()
    expected = runner.forward(ids, positions, meta, torch.tensor([3, 39]))
    kept, watched = runner.pool.tensor.clone(), Watched(runner, meta)

    runner.pool.tensor.zero_()
    logits = runner.run(ids, positions, watched, torch.tensor([3, 39]))

    assert torch.equal(logits, expected)
    assert torch.equal(runner.pool.tensor, kept)
    watched.assert_kept(kept, meta.slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_decode_in_one_call_and_layer_by_layer_give_the_same_bits(
    family: str, dtype: str, load_runner: LoadRunner
) -> None:
    """A hook or a gate is what makes a step go layer by layer; so does a chunk beside it, tested above."""
    runner = load_runner(family, dtype=dtype, forward="fused")
    tables = page_tables(runner, [60, 90, 40], seed=11)
    requests = [Request(random_prompt(n, seed=n), t) for n, t in zip((50, 80, 9), tables, strict=True)]
    for request in requests:
        run_step(runner, [(request, len(request.tokens) - 1)])
    seen: list[int] = []

    def decode(**gate: Any) -> torch.Tensor:
        for request in requests:
            request.computed = len(request.tokens) - 1
        return run_step(runner, [(request, 1) for request in requests], **gate)

    class Open:
        def wait(self, layer: int) -> None:
            seen.append(layer)

    expected = decode()
    assert isinstance(runner._fused, FusedForward)
    assert runner._fused._decode_steps[0] is not None

    assert torch.equal(decode(gate=Open()), expected)
    handle = layers_of(runner)[1].self_attn.register_forward_pre_hook(lambda *_: seen.append(9), with_kwargs=True)
    assert torch.equal(decode(), expected)
    handle.remove()
    assert torch.equal(decode(), expected)
    assert seen == [0, 1, 2, 9]


def test_hooks_see_what_attention_is_given(load_runner: LoadRunner) -> None:
    """The same hidden states as the portable path's hooks see, and no bit of the step is changed by their presence."""
    fused, portable = (hooked_states(load_runner("llama", forward=forward)) for forward in ("fused", "portable"))

    assert len(fused) == 3
    torch.testing.assert_close(fused, portable, rtol=1e-4, atol=1e-4)


def test_hooks_that_change_something_are_refused(load_runner: LoadRunner) -> None:
    """They would go unheard."""
    runner = load_runner("llama", forward="fused")
    module = layers_of(runner)[1].self_attn
    wrong: list[Callable[[], Any]] = [
        lambda: module.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True),
        lambda: module.register_forward_pre_hook(lambda module, args: None),
    ]

    for register in wrong:
        handle = register()
        with pytest.raises(InvariantViolated, match="hooks"):
            logits_of(runner, [7, 8, 9], [3])
        handle.remove()
    assert logits_of(runner, [7, 8, 9], [3]).isfinite().all()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ids": torch.tensor([7, 300])}, "token"),
        ({"ids": torch.tensor([7, -1])}, "token"),
        ({"positions": torch.tensor([-1, 0])}, "position"),
        ({"last_rows": torch.tensor([2])}, "row of the step"),
        ({"table": np.array([64], dtype=np.int32)}, "slot of the pool"),
    ],
)
def test_what_does_not_exist_is_not_read_or_written(change: dict[str, Any], what: str, load_runner: LoadRunner) -> None:
    """Kernels go where they are told to, so they are told nothing wrong."""
    runner = load_runner("llama3", forward="fused")
    step = {"ids": torch.tensor([7, 8]), "positions": torch.arange(2), "last_rows": torch.tensor([1])}
    step |= {"table": np.array([0], dtype=np.int32)} | change
    meta = ForwardMeta.build([Segment(2, 0, step["table"])], 16, "cpu")  # type: ignore[arg-type]

    with pytest.raises(InvariantViolated, match=what):
        runner.forward(step["ids"], step["positions"], meta, step["last_rows"])


def test_tables_of_rotations_grow_with_positions(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And change nothing for positions that they had."""
    expected = logits_of(load_runner("llama3", forward="fused"), random_prompt(200, seed=10), [150, 49, 1])
    monkeypatch.setattr(rotations, "_FIRST_POSITIONS", 4)

    runner = load_runner("llama3", forward="fused")

    assert torch.equal(logits_of(runner, random_prompt(200, seed=10), [150, 49, 1]), expected)


def test_weights_are_kept_once(checkpoint: Callable[[str], Path]) -> None:
    """Of the model's own linear layers and of an embedding that is tied to the head, nothing is left."""
    model = load_model(checkpoint("llama3"), load_config(checkpoint("llama3")), dtype="float32", device="cpu")
    weights = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    parameters = sum(present(weight()).numel() for weight in weights)
    kernels = FusedKernels(torch.float32)

    fused = FusedModel(model, describe(model, [None] * 3), kernels)
    gc.collect()

    assert [weight() for weight in weights] == [None] * len(weights)
    assert all(parameter.dim() == 1 for parameter in model.parameters())
    assert parameters <= fused.weight_numbers < parameters * 1.02


def test_without_a_compiler_the_portable_path_serves(
    checkpoint: Callable[[str], Path], load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fast as it was, with the reason in the log; whoever insists is told."""
    monkeypatch.setenv("CC", "/nowhere/cc")

    assert _is_portable(load_runner("llama"))
    with pytest.raises(ConfigError, match="--forward fused: fused kernels cannot be compiled"):
        load_runner("llama", forward="fused")


def test_processors_it_was_not_measured_on_compute_portably(
    load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the fused path is asked for by name."""
    monkeypatch.setattr(FusedKernels, "are_tuned", property(lambda self: False))

    assert _is_portable(load_runner("llama"))
    assert not _is_portable(load_runner("llama", forward="fused"))


def test_the_fused_path_is_not_promised_where_it_cannot_be() -> None:
    """Ranks compute portably; to ask for anything else is a fault of the settings."""
    WorkerConfig(model="m", tensor_parallel=2)
    WorkerConfig(model="m", device="cuda", forward="fused")

    with pytest.raises(ValueError, match="--forward fused"):
        WorkerConfig(model="m", forward="fused", tensor_parallel=2)


@pytest.mark.parametrize("family", ["gemma2", "opt"])
def test_other_models_are_computed_portably(family: str, load_runner: LoadRunner) -> None:
    """What is not built like Llama is not forced to be."""
    assert _is_portable(load_runner(family))
    with pytest.raises(ConfigError, match="is not a model that it knows"):
        load_runner(family, forward="fused")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3}, "hidden size of 72"),
        ({"hidden_act": "gelu"}, "its MLP has gelu"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "head dimension of 8"),
    ],
)
def test_a_model_of_the_family_with_something_else_is_refused(changes: dict[str, Any], reason: str) -> None:
    """By what it is made of, not by its name."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=64, **{**settings, "num_key_value_heads": 2, **changes})
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(NotOfTheFamily, match=reason):
        describe(model, [None])


def _is_portable(runner: ModelRunner) -> bool:
    return runner._fused is None
