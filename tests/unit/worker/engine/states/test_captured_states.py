"""Captured decode steps of models whose layers carry states: the library's tokens, and the states of ordinary steps.

Graphs are played by functions over the static memory, with the oracles of kernels: all but the capture is then what a
GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_loading import expected_windows, load_config
from services.worker.engine.model_runner import STATE_COPIES, ModelRunner
from services.worker.engine.states.captured import SlottedSteps
from services.worker.proving.shape import expected_shape
from tests.cuda.played_capture import PlayedCapture
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt, run_step
from tests.reference import Reference
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.engine import interpreted_planes
from tests.unit.worker.engine.states.test_state_models import NEW_TOKENS, decided_prompt
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.conftest import interpreter
from tests.unit.worker.kernels.interpreted import Interpreter
from tests.unit.worker.runners import LoadRunner

__all__ = ["interpreter"]

CAPTURED = ("qwen3_next", "bamba", "falcon_h1", "lfm2", "zamba2", "recurrent_gemma", "rwkv", "mamba", "mamba2")
MOST_ROWS = 4


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every step that a graph served."""
    served: list[int] = []
    replay = DecodeGraphs.replay

    def noted(self: DecodeGraphs, *step: torch.Tensor) -> torch.Tensor | None:
        logits = replay(self, *step)  # type: ignore[arg-type]
        if logits is not None:
            served.append(len(logits))
        return logits

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    return served


def capture(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Have the runner's decode steps played, as a worker on a GPU does."""

    def made(runner: ModelRunner, most_rows: int, *_: object) -> DecodeGraphs:
        return DecodeGraphs(runner, most_rows, capture=PlayedCapture(), kernels=oracles)

    monkeypatch.setattr("services.worker.engine.model_runner.capture_decode", made)
    return runner.capture_decode(MOST_ROWS)


@pytest.mark.parametrize(
    ("family", "page_size"), [*((family, 16) for family in CAPTURED), ("bamba", 1), ("lfm2", 2), ("qwen3_next", 4)]
)
def test_captured_tokens_equal_generate(
    family: str,
    page_size: int,
    load_runner: LoadRunner,
    truth: Callable[[str], Reference],
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the ends of pages, with padding, beside chunks that no graph serves, and going on from ordinary steps."""
    runner = load_runner(family, page_size=page_size)
    graphs = capture(runner, monkeypatch)
    prompts = [decided_prompt(truth(family), [], length) for length in (5, 32, 75)]
    tables = page_tables(runner, [len(prompt) + NEW_TOKENS for prompt in prompts], seed=page_size)
    requests = [
        Request(list(prompt), table, slot=slot)
        for slot, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]

    decode_greedily(runner, requests, chunks=[5, 16, 31], new_tokens=NEW_TOKENS)

    expected = [truth(family).greedy(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    assert graphs.fault == ""
    assert [request.output for request in requests] == expected
    assert {1, 2, 3} >= set(replays)
    assert len(replays) >= NEW_TOKENS - 1


def test_a_prefix_that_graphs_have_computed_is_found_again(
    load_runner: LoadRunner, truth: Callable[[str], Reference], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that decode steps end keep the states of their ends."""
    runner = load_runner("qwen3_next")
    capture(runner, monkeypatch)
    tokens = decided_prompt(truth("qwen3_next"), random_prompt(48, seed=1), 11)
    first_table, second_table = page_tables(runner, [48, 16 + NEW_TOKENS], seed=3)
    first = Request(tokens[:48], first_table, slot=0)
    run_step(runner, [(first, 1)])
    for _ in range(47):
        run_step(runner, [(first, 1)])
    second = Request(list(tokens), np.concatenate([first_table, second_table]), computed=48, slot=1)

    decode_greedily(runner, [second], chunks=[16], new_tokens=NEW_TOKENS)

    assert len(replays) >= 47
    assert second.output == truth("qwen3_next").greedy(tokens, NEW_TOKENS, ignore_eos=True)


def test_steps_that_are_launched_ahead_carry_states(
    load_runner: LoadRunner, truth: Callable[[str], Reference], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor launches a step before the tokens of the last are read, and each row goes on from its own slot."""
    runner = load_runner("bamba")
    capture(runner, monkeypatch)
    launched = 0
    launch = ModelRunner.launch

    def counted(self: ModelRunner, *step: object) -> object:
        nonlocal launched
        launched += 1
        return launch(self, *step)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "launch", counted)
    prompts = [decided_prompt(truth("bamba"), [], length) for length in (13, 30)]
    driven = Driven(runner)
    for name, prompt, table in zip("ab", prompts, page_tables(runner, [64, 64], seed=5), strict=True):
        driven.give(admit(prompt, table.tolist(), request_id=name, max_tokens=NEW_TOKENS))
        driven.give(batch(chunk(0, len(prompt), request_id=name)))
    driven.run()

    found = [driven.tokens(name) for name in "ab"]
    driven.close()
    expected = [truth("bamba").greedy(prompt, NEW_TOKENS) for prompt in prompts]
    assert found == expected
    assert launched >= NEW_TOKENS - 3
    assert len(replays) >= launched


def test_steps_beside_kernels_of_gpus_give_the_logits_of_a_cpu(
    checkpoint: Callable[[str], Path], interpreter: Interpreter
) -> None:
    """Layers that attend do so by Triton's kernels, and those with states beside them as on a CPU."""
    found, expected = interpreter.call(interpreted_planes.logits, checkpoint("qwen3_next"), 16, "triton")

    assert len(found) == len(interpreted_planes.STEPS) + 1
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2"])
def test_what_kernels_are_proven_with_is_known_before_weights_are_read(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """A model without attention is proven with any heads."""
    config = load_config(checkpoint(family))

    shape = expected_shape(
        config, expected_windows(config), dtype=torch.bfloat16, page_size=16, device="cuda", kv_dtype="auto"
    )

    assert shape.query_heads % shape.geometry.kv_heads == 0


def test_what_a_graph_does_not_serve(load_runner: LoadRunner) -> None:
    """First tokens, rows without a slot, and rows that begin behind a page which another row ends in the same step."""
    runner = load_runner("lfm2")
    steps = runner.slotted_steps
    assert isinstance(steps, SlottedSteps)
    table = np.arange(8, dtype=np.int32)

    assert steps.serves([Segment(1, 15, table, running=0), Segment(1, 40, table[4:], running=1)])
    assert not steps.serves([Segment(1, 0, table, running=0)])
    assert not steps.serves([Segment(1, 5, table)])
    assert not steps.serves([Segment(1, 15, table, running=0), Segment(1, 16, table, running=1)])


def test_a_graph_that_forgets_states_serves_nobody(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with an ordinary step sees it."""
    runner = load_runner("qwen3_next")
    monkeypatch.setattr(SlottedSteps, "bring", lambda self, segments: self.slots.zero_())

    graphs = capture(runner, monkeypatch)

    assert graphs.shapes == []
    assert "the captured step gives other logits" in graphs.fault


def test_padding_leaves_the_slots_of_requests_alone(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have the last slot, which is no request's."""
    runner = load_runner("bamba")
    graphs = capture(runner, monkeypatch)
    tables = page_tables(runner, [32, 32, 32], seed=2)
    requests = [Request(random_prompt(9, seed=slot), table, slot=slot) for slot, table in enumerate(tables)]
    run_step(runner, [(request, 9) for request in requests])
    assert runner.slots is not None
    before = runner.slots[:-1].clone()
    meta = ForwardMeta.build([Segment(1, 9, tables[1], running=1)], 16, "cpu")

    found = graphs.replay(torch.tensor([7]), torch.tensor([9]), meta, torch.tensor([0]))

    assert found is not None
    changed = (runner.slots[:-1] != before).any(dim=1).nonzero()[:, 0]
    assert changed.tolist() == [1]


def test_slots_and_steps_over_them_are_counted_into_the_room(load_runner: LoadRunner) -> None:
    """The pool that is measured over has slots of its own, which are not part of the peak."""
    runner = load_runner("bamba")
    assert runner.slots is not None
    measured = ModelRunner(runner.model, runner.pool, vocab_size=0, states=runner.states)
    assert measured.slots is not None
    largest = max(each.nbytes for each in runner.states)

    assert measured.slots.shape == runner.slots.shape
    assert measured.slot_bytes == sum(each.nbytes for each in runner.states) + STATE_COPIES * largest
