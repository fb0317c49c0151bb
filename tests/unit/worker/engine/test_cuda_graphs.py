"""Decode steps over static memory give the logits of ordinary steps, and whatever is no decode step goes past them.

A graph is played by a function that computes the captured step over the static memory when it is replayed, with the
kernels' oracles: all but the capture itself is then what a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.adapters import Adapter, LowRank
from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.sampler import SampleRow, sample
from services.worker.engine.static_batch import PADDING, StaticBatch
from services.worker.engine.unread_tokens import Following
from services.worker.restore.attention_inputs import AttentionInputs
from shared.messages.requests import SamplingParams
from tests.checkpoints import UNLIKE
from tests.engine_driver import page_tables, random_prompt
from tests.unit.worker.kernels import oracles
from tests.unit.worker.runners import LoadRunner

MOST_ROWS = 6


class PlayedGraph:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._run()


class PlayedCapture:
    """Every graph takes ``graph_bytes``; that of number ``fails_at`` cannot be captured, that of ``lies_at`` computes
    other logits than it should.
    """

    def __init__(self, *, graph_bytes: int = 0, fails_at: int = -1, lies_at: int = -1) -> None:
        self.graphs: list[PlayedGraph] = []
        self._graph_bytes, self._fails_at, self._lies_at = graph_bytes, fails_at, lies_at

    def graph_of(self, run: Callable[[], None]) -> PlayedGraph:
        if len(self.graphs) == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()  # As before a real capture, over padding alone.
        self.graphs.append(PlayedGraph((lambda: None) if len(self.graphs) == self._lies_at else run))
        return self.graphs[-1]

    def used_bytes(self) -> int:
        return self._graph_bytes * len(self.graphs)


def graphs_of(runner: ModelRunner, **capture: int) -> tuple[DecodeGraphs, PlayedCapture]:
    played = PlayedCapture(**capture)
    return DecodeGraphs(runner, MOST_ROWS, capture=played, kernels=oracles, most_bytes=1000), played


class Decoding:
    """Requests whose prompts are computed, so that one token of each can be decoded as often as one likes."""

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], seed: int = 1) -> None:
        self.runner, self.lengths = runner, lengths
        self.tables = page_tables(runner, [length + 1 for length in lengths], seed=seed)
        self.ids = torch.tensor(random_prompt(len(lengths), seed=seed + 1))
        self.positions = torch.tensor(lengths)
        self.last_rows = torch.arange(len(lengths))
        for number, (length, table) in enumerate(zip(lengths, self.tables, strict=True)):
            if length:
                prompt = torch.tensor(random_prompt(length, seed=seed + number))
                meta = ForwardMeta.build([Segment(length, 0, table)], self.page_size, "cpu")
                runner.run(prompt, torch.arange(length), runner.paged_step(meta), torch.empty(0, dtype=torch.int64))

    @property
    def page_size(self) -> int:
        return self.runner.geometry.page_size

    def meta(self, gate: Any = None) -> ForwardMeta:
        segments = [Segment(1, length, table) for length, table in zip(self.lengths, self.tables, strict=True)]
        return ForwardMeta.build(segments, self.page_size, "cpu", gate)

    def eager(self) -> torch.Tensor:
        return self.runner.run(self.ids, self.positions, self.runner.paged_step(self.meta()), self.last_rows)

    def pool(self) -> torch.Tensor:
        return self.runner.pool.tensor.clone()


@pytest.mark.parametrize("family", ["llama", "gemma2", *UNLIKE])
def test_every_batch_size_gives_the_logits_of_an_ordinary_step(family: str, load_runner: LoadRunner) -> None:
    """Padding changes nothing: not the logits, and of the pool only the slots of the step's own tokens."""
    runner = load_runner(family, tokens=512)
    graphs, _ = graphs_of(runner)

    for rows in range(1, MOST_ROWS + 1):
        decoding = Decoding(runner, [3 + 11 * row for row in range(rows)], seed=rows)
        expected = decoding.eager()
        written = decoding.pool()
        runner.pool.tensor[:, :, decoding.tables[0][-1], decoding.lengths[0] % decoding.page_size] = 0
        found = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)

        assert found is not None
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(runner.pool.tensor, written, atol=1e-5, rtol=1e-4)


def test_a_larger_step_before_leaves_nothing_behind(load_runner: LoadRunner) -> None:
    """Its page tables and contexts are still in the memory of which the smaller one has the first rows."""
    runner = load_runner("llama", tokens=512)
    graphs, _ = graphs_of(runner)
    large = Decoding(runner, [60, 50, 40, 30, 20], seed=1)
    graphs.replay(large.ids, large.positions, large.meta(), large.last_rows)
    small = Decoding(runner, [2, 33, 5], seed=40)
    expected = small.eager()
    before = small.pool()

    found = graphs.replay(small.ids, small.positions, small.meta(), small.last_rows)

    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(runner.pool.tensor, before, atol=1e-5, rtol=1e-4)


def test_logits_outlive_the_next_step(load_runner: LoadRunner) -> None:
    """The sampler may still look at them."""
    runner = load_runner("llama", tokens=512)
    graphs, _ = graphs_of(runner)
    decoding = Decoding(runner, [3, 20])
    first = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)
    assert first is not None
    kept = first.clone()

    graphs.replay(decoding.ids.flip(0), decoding.positions, decoding.meta(), decoding.last_rows)

    assert torch.equal(first, kept)


class NoGate:
    def wait(self, layer: int) -> None:
        pass


def test_what_is_no_plain_decode_step_goes_the_ordinary_way(load_runner: LoadRunner) -> None:
    """A chunk, a gate, rows that nobody samples, rows in another order, and more rows than any graph has."""
    runner = load_runner("llama", tokens=512)
    graphs, played = graphs_of(runner)
    decoding, many = Decoding(runner, [3, 20]), Decoding(runner, [1] * (MOST_ROWS + 1))
    chunk = ForwardMeta.build(
        [Segment(2, 0, decoding.tables[0]), Segment(1, 20, decoding.tables[1])], decoding.page_size, "cpu"
    )
    replays = [graph.replays for graph in played.graphs]

    assert graphs.shape_for(decoding.meta(), decoding.last_rows) == DecodeShape(2, 512)
    assert graphs.replay(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 20]), chunk, torch.arange(2)) is None
    assert graphs.replay(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 20]), chunk, torch.arange(3)) is None
    for meta, last_rows in (
        (decoding.meta(NoGate()), decoding.last_rows),
        (decoding.meta(), torch.tensor([1])),
        (decoding.meta(), torch.tensor([1, 0])),
        (many.meta(), many.last_rows),
    ):
        assert graphs.replay(torch.zeros(meta.rows, dtype=torch.int64), last_rows, meta, last_rows) is None
    assert [graph.replays for graph in played.graphs] == replays


def test_a_step_whose_hidden_states_are_taken_down_goes_the_ordinary_way(load_runner: LoadRunner) -> None:
    """A graph calls no module, so hooks would see nothing; once they are gone it serves again."""
    runner = load_runner("llama", tokens=512)
    graphs, _ = graphs_of(runner)
    decoding = Decoding(runner, [3, 20])

    class Sink:
        def take(self, layer: int, hidden: torch.Tensor) -> None:
            pass

    with AttentionInputs(runner.model, runner.geometry.layers).given_to(Sink()):
        assert graphs.shape_for(decoding.meta(), decoding.last_rows) is None

    assert graphs.shape_for(decoding.meta(), decoding.last_rows) is not None


def test_loaded_adapters_leave_the_base_model_its_graphs(load_runner: LoadRunner) -> None:
    """Their hooks do nothing in its steps, and steps with rows of theirs never ask for a graph."""
    runner = load_runner("llama", tokens=512)
    runner.adapters.are_fused = False
    graphs, _ = graphs_of(runner)
    decoding = Decoding(runner, [3, 20])
    name = "model.layers.0.self_attn.q_proj"
    module = runner.model.get_submodule(name)
    terms = LowRank(torch.nn.Linear(module.in_features, 4), torch.nn.Linear(4, module.out_features), 1.0)

    runner.adapters.put(Adapter("one", (name,), {}, {name: terms}))
    runner.adapters.put(Adapter("two", (name,), {}, {name: terms}))
    loaded = graphs.shape_for(decoding.meta(), decoding.last_rows)
    with module.register_forward_hook(lambda *_: None):
        hooked = graphs.shape_for(decoding.meta(), decoding.last_rows)
    runner.adapters.drop("one")
    runner.adapters.drop("two")

    assert loaded == graphs.shape_for(decoding.meta(), decoding.last_rows) == DecodeShape(2, 512)
    assert hooked is None


def test_a_model_that_cannot_be_captured_is_served_without(load_runner: LoadRunner) -> None:
    """And what was captured before a failure, which is larger, serves what it can."""
    runner = load_runner("llama", tokens=512)
    decoding = Decoding(runner, [3, 20])

    none, _ = graphs_of(runner, fails_at=0)
    some, _ = graphs_of(runner, fails_at=2)

    assert (none.fault, some.fault) == (
        "none from 6 rows and 512 tokens on: operation not permitted when stream is capturing",
        "none from 2 rows and 512 tokens on: operation not permitted when stream is capturing",
    )
    assert none.shapes == []
    assert none.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows) is None
    assert some.shapes == [DecodeShape(6, 512), DecodeShape(4, 512)]
    assert some.shape_for(decoding.meta(), decoding.last_rows) == DecodeShape(4, 512)


def test_a_graph_that_computes_something_else_serves_nobody(load_runner: LoadRunner) -> None:
    """Its logits are compared with an ordinary step's before anything depends on them."""
    graphs, played = graphs_of(load_runner("llama", tokens=512), lies_at=1)

    assert graphs.shapes == [DecodeShape(6, 512)]
    assert len(played.graphs) == 2
    assert "the captured step gives other logits" in graphs.fault


def test_the_memory_of_graphs_is_bounded(load_runner: LoadRunner) -> None:
    """Past the bound nothing more is captured."""
    graphs, played = graphs_of(load_runner("llama", tokens=512), graph_bytes=600)

    assert len(graphs.shapes) == len(played.graphs) == 2


def test_the_runner_takes_what_its_graphs_give(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """``forward`` asks them first, and computes a step itself where they have none for it."""
    runner = load_runner("llama", tokens=512)
    graphs, played = graphs_of(runner)
    monkeypatch.setattr("services.worker.engine.model_runner.capture_decode", lambda *_: graphs)
    decoding = Decoding(runner, [3, 20])
    expected = decoding.eager()
    replays = sum(graph.replays for graph in played.graphs)

    runner.capture_decode(MOST_ROWS)
    found = runner.forward(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)
    other = runner.forward(decoding.ids, decoding.positions, decoding.meta(), torch.tensor([1]))

    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(other, expected[1:], atol=2e-4, rtol=2e-4)
    assert sum(graph.replays for graph in played.graphs) == replays + 1


def test_lengths_beyond_the_first_have_graphs_of_their_own(load_runner: LoadRunner) -> None:
    """A pool and a context of more than 512 tokens have two lengths, and each serves its steps."""
    runner = load_runner("llama", tokens=1024)
    graphs, _ = graphs_of(runner)
    short, long = Decoding(runner, [5]), Decoding(runner, [600])

    assert graphs.shape_for(short.meta(), short.last_rows) == DecodeShape(1, 512)
    assert graphs.shape_for(long.meta(), long.last_rows) == DecodeShape(1, min(1024, runner.max_context))
    expected = long.eager()
    found = graphs.replay(long.ids, long.positions, long.meta(), long.last_rows)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_table_of_pages_is_copied_whole(load_runner: LoadRunner) -> None:
    """Pages lie anywhere in the pool; the table of a request is as long as its context."""
    runner = load_runner("llama", tokens=512, page_size=1)
    graphs, _ = graphs_of(runner)
    decoding = Decoding(runner, [100, 7], seed=5)
    assert not np.all(np.diff(decoding.tables[0]) == 1)
    expected = decoding.eager()

    found = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)

    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_padding_writes_nothing_and_reads_one_token(load_runner: LoadRunner) -> None:
    """Whatever was in its rows before: a long context there would only cost time."""
    runner = load_runner("llama", tokens=512)
    batch = StaticBatch(4, 40, runner.vocab_size, runner.pool.device)
    large, small = Decoding(runner, [60, 50, 40, 30]), Decoding(runner, [2])

    batch.fill(large.ids, large.positions, large.meta(), 4)
    batch.fill(small.ids, small.positions, small.meta(), 2)

    assert batch.slots.tolist() == [*small.meta().slots.tolist(), PADDING, *large.meta().slots.tolist()[2:]]
    assert batch.context.tolist() == [2, 0, 40, 30]


def test_steps_launched_ahead_give_the_tokens_of_steps_that_are_read(load_runner: LoadRunner) -> None:
    """A real model: each step takes its tokens from where the one before has chosen them, and of fewer requests."""
    runner = load_runner("llama", tokens=512)
    decoding = Decoding(runner, [3, 20, 41])
    rows = [SampleRow(SamplingParams(max_tokens=9, temperature=heat, seed=1), 0) for heat in (0.0, 0.9, 2.0)]
    runner._graphs, played = graphs_of(runner)
    launcher = runner.launcher
    assert launcher is not None
    segments = [Segment(1, length, table) for length, table in zip(decoding.lengths, decoding.tables, strict=True)]
    fewer = [Segment(1, segments[row].context + 1, segments[row].pages) for row in (2, 0)]
    after = ForwardMeta.build(fewer, decoding.page_size, "cpu")
    where = torch.tensor([segment.context for segment in fewer])
    first = sample(decoding.eager(), rows)
    ids = torch.tensor([first[row].token for row in (2, 0)])
    second = sample(runner.run(ids, where, runner.paged_step(after), torch.arange(2)), [rows[2], rows[0]])
    before = decoding.pool()

    one = launcher.launch(decoding.ids, decoding.positions, decoding.meta(), rows)
    other = launcher.launch(Following(one, (2, 0)), where, after, [rows[2], rows[0]])

    assert one.read() == ([each.token for each in first], [True] * 3)
    assert other.read() == ([each.token for each in second], [True] * 2)
    assert sum(graph.replays for graph in played.graphs) == 2 + len(played.graphs)  # Each was checked once.
    torch.testing.assert_close(runner.pool.tensor, before, atol=1e-5, rtol=1e-4)
