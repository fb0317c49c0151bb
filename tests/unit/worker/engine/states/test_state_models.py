"""Models whose layers carry states give the library's own answers, however requests are cut up, placed and mixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.compressed import Blocks
from services.worker.engine.states.layers import StateModule
from services.worker.engine.states.step import StateStep
from shared.adapters import AdapterFiles
from shared.errors import AdapterRefused, UnsupportedModel
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt, run_step
from tests.reference import Reference
from tests.state_checkpoints import STATE_FAMILIES
from tests.unit.worker.runners import LoadRunner

NEW_TOKENS = 20
CASES = [*itertools.product(STATE_FAMILIES, [16]), *itertools.product(["qwen3_next", "bamba", "lfm2"], [1, 64])]


def decided_prompt(truth: Reference, start: list[int], length: int) -> list[int]:
    """``start`` and ``length`` more tokens, to which rounding decides none of ``NEW_TOKENS``."""
    seeds = itertools.count(length)
    return truth.decided(lambda: [*start, *random_prompt(length, seed=next(seeds))], NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(("family", "page_size"), CASES)
def test_greedy_tokens_equal_generate(
    family: str, page_size: int, load_runner: LoadRunner, truth: Callable[[str], Reference]
) -> None:
    """Chunks that end within pages and with them, mixed batches and shuffled pages change no token."""
    runner = load_runner(family, page_size=page_size)
    prompts = [decided_prompt(truth(family), [], length) for length in (5, 32, 75)]
    tables = page_tables(runner, [len(prompt) + NEW_TOKENS for prompt in prompts], seed=page_size)
    requests = [
        Request(list(prompt), table, slot=slot)
        for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]

    decode_greedily(runner, requests, chunks=[5, 16, 31], new_tokens=NEW_TOKENS)

    expected = [truth(family).greedy(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    assert [request.output for request in requests] == expected


@pytest.mark.parametrize(
    ("family", "same_step"),
    [
        *(
            (family, False)
            for family in ("qwen3_next", "qwen4_exp", "deepseek_v4", "bamba", "falcon_h1", "lfm2", "mamba")
        ),
        *((family, True) for family in ("bamba", "lfm2", "qwen4_exp", "deepseek_v4")),
    ],
)
def test_prefix_hits_change_no_token(
    family: str, same_step: bool, load_runner: LoadRunner, truth: Callable[[str], Reference]
) -> None:
    """A request may begin behind pages that another has filled, or fills in the very same step."""
    runner = load_runner(family)
    shared = random_prompt(48, seed=1)
    suffix = decided_prompt(truth(family), shared, 11)[len(shared) :]
    first_table, second_table = page_tables(runner, [len(shared) + 1, len(suffix) + NEW_TOKENS], seed=3)
    first = Request([*shared, 7], first_table, slot=0)
    second = Request([*shared, *suffix], np.concatenate([first_table[:3], second_table]), computed=48, slot=1)

    if same_step:
        logits = run_step(runner, [(second, 11), (first, 49)])[0]
    else:
        run_step(runner, [(first, 49)])
        logits = run_step(runner, [(second, 11)])[0]
    second.tokens.append(int(logits.argmax()))
    decode_greedily(runner, [second], chunks=[1], new_tokens=NEW_TOKENS)

    assert second.output == truth(family).greedy([*shared, *suffix], NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("family", ["rwkv", "bamba"])
def test_prompts_of_one_token_begin_in_the_same_step(family: str, load_runner: LoadRunner) -> None:
    """RWKV's layers mix sequences of one token up, those that begin too."""
    runner = load_runner(family)
    tables = page_tables(runner, [16] * 4, seed=1)
    requests = [Request(random_prompt(1, seed=slot), table, slot=slot) for slot, table in enumerate(tables)]

    together = run_step(runner, [(request, 1) for request in requests])

    for request, logits in zip(requests, together, strict=True):
        request.computed = 0
        torch.testing.assert_close(run_step(runner, [(request, 1)])[0], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("source", ["from_pages", "from_slots"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp", "bamba", "lfm2", "mamba"])
def test_a_model_whose_states_are_forgotten_is_refused(
    family: str, source: str, load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at load see a state that is not carried over the end of a page, and one that is not within a page."""
    read = StateStep._read

    def forgetting(self: StateStep, module: Any, group: Any) -> torch.Tensor:
        packed = read(self, module, group)
        places = getattr(group, source)
        return packed if places is None else packed.index_fill_(0, places.pieces, 0)

    monkeypatch.setattr(StateStep, "_read", forgetting)

    with pytest.raises(UnsupportedModel, match="other logits than its own"):
        load_runner(family)


@pytest.mark.parametrize("method", ["_entries", "_before", "_of_slot"])
def test_a_model_whose_blocks_are_forgotten_is_refused(
    method: str, load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at load see entries of earlier blocks, overlaps and open rows that are not what they were."""
    read = getattr(Blocks, method)

    def forgetting(self: Blocks, *arguments: Any) -> Any:
        found = read(self, *arguments)
        return [torch.zeros_like(each) for each in found] if isinstance(found, list) else torch.zeros_like(found)

    monkeypatch.setattr(Blocks, method, forgetting)

    with pytest.raises(UnsupportedModel, match="other logits than its own"):
        load_runner("deepseek_v4")


def test_pages_hold_whole_blocks(load_runner: LoadRunner) -> None:
    """Where nobody chose a size, it is a multiple of every rate; another size is refused with the reason."""
    assert load_runner("deepseek_v4", page_size=0).geometry.page_size % 16 == 0
    with pytest.raises(UnsupportedModel, match="compress 16 tokens at a time"):
        load_runner("deepseek_v4", page_size=8)


def test_a_page_of_compressed_blocks_takes_what_the_formula_says(load_runner: LoadRunner) -> None:
    """One row a token of each layer, as V is K; an entry for each block; what the next block needs of the last."""
    planes = load_runner("deepseek_v4", page_size=32).pool.planes

    rows = 32 * 32 * 4  # Tokens, values, bytes.
    sparse = 32 // 4 * (32 + 16) * 4 + 2 * 4 * (32 + 16) * 4  # Entries and keys; K and gates of four rows of each.
    heavy = 32 // 16 * 32 * 4
    assert planes.content_bytes == 3 * rows + sparse + heavy


def test_a_page_takes_what_the_formula_says(load_runner: LoadRunner) -> None:
    """K and V of every token of layers that attend, and every state once."""
    sizes = {}
    for page_size in (1, 16, 64):
        runner = load_runner("qwen3_next", page_size=page_size)
        sizes[page_size] = runner.pool.planes.content_bytes
        assert runner.geometry.page_bytes - runner.pool.planes.content_bytes == runner.pool.planes.padding_bytes

    kv_token = 2 * 2 * 16 * 4  # K and V, two heads of 16 float32 values, in one layer of three.
    convolution = (2 * 8 + 2 * 8 + 4 * 8) * 4 * 4  # Queries, keys and values; four inputs.
    recurrent = 4 * 8 * 8 * 4
    assert sizes == {size: size * kv_token + 2 * (convolution + recurrent) for size in sizes}


@pytest.mark.parametrize(("family", "size"), [("lfm2", 16), ("bamba", 64), ("mamba", 256)])
def test_the_size_of_pages_is_chosen_for_the_model(family: str, size: int, load_runner: LoadRunner) -> None:
    """Where nobody chose one."""
    assert load_runner(family, page_size=0).geometry.page_size == size


def test_states_are_kept_in_the_data_types_of_their_layers(load_runner: LoadRunner) -> None:
    """In bfloat16 the convolution's inputs are bfloat16, and the recurrent state stays float32."""
    runner = load_runner("qwen3_next", dtype="bfloat16")

    (module, _) = runner.states

    assert isinstance(module, StateModule)
    assert [(part.kind, part.dtype) for part in module.parts] == [
        ("conv", torch.bfloat16),
        ("recurrent", torch.float32),
    ]


def test_decoding_requests_do_not_notice_their_batch(load_runner: LoadRunner) -> None:
    """Logits of a decode token are those that it has alone, up to rounding of sums over other numbers of rows."""
    runner = load_runner("bamba")
    tables = page_tables(runner, [64, 80, 120], seed=8)
    requests = [Request(random_prompt(39 + 20 * n, seed=n), table, slot=n) for n, table in enumerate(tables)]
    again = Request(requests[0].tokens, page_tables(runner, [64, 80, 120, 64], seed=8)[3], slot=3)
    for request in (*requests, again):
        run_step(runner, [(request, len(request.tokens) - 1)])

    alone = run_step(runner, [(again, 1)])[0]
    together = run_step(runner, [(requests[1], 1), (requests[0], 1), (requests[2], 1)])[1]

    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_adapters_of_layers_with_states_are_refused(load_runner: LoadRunner) -> None:
    """Their modules are called piece by piece, so nobody could say whose rows they see."""
    runner = load_runner("lfm2")

    with pytest.raises(AdapterRefused, match="its layers carry states"):
        runner.adapters.prepare(AdapterFiles(Path(), "1" * 32, ()), {})
