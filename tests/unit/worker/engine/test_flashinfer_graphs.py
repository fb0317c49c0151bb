"""Captured decode steps attend by FlashInfer: planned on the host before each replay, over memory that stays.

A stand-in computes in torch what FlashInfer would, from the buffers and the division that a replay finds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bench.step_kernels.counting import Counted, counting
from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.flashinfer_graphs import FlashInferGraphs
from services.worker.engine.flashinfer_lists import cascade, step_lists
from services.worker.engine.flashinfer_plans import Planner
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors, pages_for, tiles_of
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.shared_prefixes import MEMBERS, SharedTiles
from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry
from tests.cuda import flashinfer_stand_in
from tests.cuda.flashinfer_stand_in import VERSIONS, Machine
from tests.cuda.late_device import LateStream
from tests.cuda.record_flashinfer import DECODE, PREFILL
from tests.cuda.strict_capture import StrictCapture
from tests.unit.worker.engine.test_cuda_graphs import Decoding
from tests.unit.worker.kernels import oracles
from tests.unit.worker.runners import LoadRunner

MOST_ROWS = 12


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With the latest version of FlashInfer whose signatures are recorded, unless a test names others."""
    made = Machine(version=getattr(request, "param", VERSIONS[-1]), takes_float32=True)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in.module(made))
    return made


def _graphs(runner: ModelRunner, machine: Machine, most_rows: int = MOST_ROWS) -> DecodeGraphs:
    longest = min(runner.max_context, runner.pool.pages * runner.geometry.page_size)
    planner = Planner(runner.geometry, runner.pool.device)
    attention = FlashInferGraphs(planner, most_rows, pages_for(longest, runner.geometry.page_size))
    return DecodeGraphs(
        runner, most_rows, capture=StrictCapture(machine), kernels=oracles, attention=attention, most_bytes=1000
    )


class Sharing(Decoding):
    """Requests whose first ``shared`` tokens are one document's, but for the last request."""

    def __init__(self, runner: ModelRunner, lengths: Sequence[int], shared: int) -> None:
        super().__init__(runner, lengths)
        for table in self.tables[1:-1]:
            table[: shared // self.page_size] = self.tables[0][: shared // self.page_size]


@pytest.mark.parametrize("machine", VERSIONS, indirect=True)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_batch_size_gives_the_logits_of_an_ordinary_step(
    family: str, load_runner: LoadRunner, machine: Machine
) -> None:
    """With one number of query heads to a KV head or another, windows and soft caps, and padding behind the rows."""
    runner = load_runner(family, tokens=512)
    graphs = _graphs(runner, machine, 6)

    assert graphs.fault == ""
    for rows in range(1, 7):
        decoding = Decoding(runner, [3 + 11 * row for row in range(rows)], seed=rows)
        expected = decoding.eager()
        written = decoding.pool()
        runner.pool.tensor[:, :, decoding.tables[0][-1], decoding.lengths[0] % decoding.page_size] = 0
        found = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)

        assert found is not None
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(runner.pool.tensor, written, atol=1e-5, rtol=1e-4)


def test_a_graph_serves_steps_of_any_length(load_runner: LoadRunner, machine: Machine) -> None:
    """The division of a step is planned, not captured: short steps follow long ones through the same graph."""
    runner = load_runner("llama", tokens=2048)
    graphs = _graphs(runner, machine, 2)

    assert [shape for shape in graphs.shapes if not shape.shares] == [DecodeShape(2, 2048), DecodeShape(1, 2048)]
    for length in (900, 3, 1000):
        decoding = Decoding(runner, [length, 40])
        expected = decoding.eager()
        found = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_document_is_attended_to_once(load_runner: LoadRunner, machine: Machine) -> None:
    """In a graph of its own, whose two parts are merged for those that share it; the logits are the same."""
    runner = load_runner("llama", tokens=8192)
    graphs = _graphs(runner, machine)
    sharing = Sharing(runner, [600 + 5 * row for row in range(11)], shared=592)
    expected = sharing.eager()
    machine.ran.clear()

    found = graphs.replay(sharing.ids, sharing.positions, sharing.meta(), sharing.last_rows)

    assert graphs.shape_for(sharing.meta(), sharing.last_rows) == DecodeShape(12, 2048, shares=True)
    assert machine.ran == [DECODE, PREFILL, "merge_state_in_place"] * runner.geometry.layers
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    apart = Decoding(runner, [600 + 5 * row for row in range(11)])
    assert graphs.shape_for(apart.meta(), apart.last_rows) == DecodeShape(12, 2048)


def test_layers_with_windows_attend_whole_where_others_do_in_parts(load_runner: LoadRunner, machine: Machine) -> None:
    """A window hides the document from most of its layers, and both kinds are planned for one replay."""
    runner = load_runner("gemma2", tokens=8192)
    graphs = _graphs(runner, machine)
    sharing = Sharing(runner, [600 + 5 * row for row in range(11)], shared=592)
    expected = sharing.eager()
    machine.ran.clear()

    found = graphs.replay(sharing.ids, sharing.positions, sharing.meta(), sharing.last_rows)

    in_parts = machine.ran.count("merge_state_in_place")
    assert 0 < in_parts < runner.geometry.layers
    assert machine.ran.count(DECODE) == runner.geometry.layers
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_step_is_planned_before_each_replay_and_never_in_one(load_runner: LoadRunner, machine: Machine) -> None:
    """Once for each kind of layer, whatever the number of layers; a capture in which something is planned fails."""
    runner = load_runner("llama", tokens=512)
    graphs = _graphs(runner, machine, 2)
    decoding = Decoding(runner, [3, 20])
    machine.planned.clear()

    for _ in range(3):
        graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)

    assert machine.planned == [DECODE] * 3
    with StrictCapture(machine)._capturing(), pytest.raises(RuntimeError, match="a plan is made"):
        _plan(graphs, decoding.meta())


def _plan(graphs: DecodeGraphs, meta: ForwardMeta) -> None:
    assert graphs._attention is not None
    graphs._attention.plan(meta.segments, None, DecodeShape(2, 512))


def test_a_shape_refuses_what_it_does_not_serve(load_runner: LoadRunner, machine: Machine) -> None:
    """Before anything of the wrappers' memory is written."""
    runner = load_runner("llama", tokens=512)
    graphs = _graphs(runner, machine, 2)
    machine.planned.clear()

    with pytest.raises(InvariantViolated, match="2 rows cannot compute 3 requests"):
        _plan(graphs, Decoding(runner, [3, 20, 4]).meta())
    assert machine.planned == []


def test_a_plan_does_not_overtake_the_replay_before(machine: Machine) -> None:
    """Two replays, of which nobody reads a result before both are launched: each computes what was planned for it."""
    machine.stream = stream = LateStream()
    geometry = KvGeometry(layers=1, kv_heads=2, head_dim=64, page_size=8, dtype="bfloat16")
    graphs = FlashInferGraphs(Planner(geometry, torch.device("cpu"), fence=stream.record), 2, 16)
    shape, random = DecodeShape(2, 128), torch.Generator().manual_seed(0)
    pool = torch.randn((32, 8, 2, 64), generator=random).bfloat16()
    q = torch.randn((2, 4, 64), generator=random).bfloat16()
    attend, pages = graphs.of_shape(shape), np.arange(32, dtype=np.int32)
    steps = [
        [Segment(1, 100, pages), Segment(1, 7, pages[20:])],
        [Segment(1, 30, pages[9:]), Segment(1, 64, pages[3:])],
    ]
    attend(q, pool, pool, scaling=0.125)

    found = []
    for segments in steps:
        graphs.plan(segments, None, shape)
        found.append(attend(q, pool, pool, scaling=0.125))
    stream.synchronize()

    for segments, each in zip(steps, found, strict=True):
        expected = oracles.paged_attention(
            q, pool, pool, paged_tensors(segments, 8, torch.device("cpu")), scaling=0.125
        )
        torch.testing.assert_close(each.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("shares", "kernels"), [(False, {}), (True, {"aten::index_select": 3})])
def test_nothing_goes_between_host_and_device_in_a_captured_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, *, shares: bool, kernels: dict[str, int]
) -> None:
    """Of a GPU that is played by fake tensors, from which nothing can be read; nor does planning read anything."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    machine.is_fake = True
    geometry = KvGeometry(layers=1, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
    document = np.arange(64, dtype=np.int32)
    segments = [Segment(1, 1030, np.concatenate([document, [row + 64, 0]]).astype(np.int32)) for row in range(7)]
    shape = DecodeShape(8, 2048, shares=shares)

    with counting() as counter:
        graphs = FlashInferGraphs(Planner(geometry, torch.device("cuda"), fence=lambda: None), 8, 128)
        q = torch.zeros((8, 4, 64), dtype=torch.bfloat16, device="cuda")
        pool = torch.zeros((128, 16, 2, 64), dtype=torch.bfloat16, device="cuda")
        attend = graphs.of_shape(shape)
        attend(q, pool, pool, scaling=0.125)
        graphs.plan(segments, tiles_of(segments, 16), shape)
        counter.counted = Counted()
        machine.ran.clear()
        attend(q, pool, pool, scaling=0.125)
        counted = counter.counted

    assert counted.uploads.total() == 0
    assert {name: count for name, count in counted.kernels.items() if name == "aten::index_select"} == kernels
    assert machine.ran == ([DECODE, PREFILL, "merge_state_in_place"] if shares else [DECODE])


def test_lists_of_a_step() -> None:
    """Pages that hold keys and no others, the keys of the last one, and padding that reads one key."""
    pages = np.arange(10, 20, dtype=np.int32)

    found = step_lists([Segment(1, 8, pages), Segment(3, 5, pages[5:])], 8, padded=4)

    assert found.rows.tolist() == [0, 1, 4, 5, 6]
    assert found.starts.tolist() == [0, 2, 3, 4, 5]
    assert found.pages.tolist() == [10, 11, 15, 0, 0]
    assert found.last.tolist() == [1, 8, 1, 1]
    assert found.lengths(8).tolist() == [9, 8, 1, 1]


def test_lists_of_a_step_in_two_parts() -> None:
    """Rows that share pages come first, tile by tile; part of a page is left to each request."""
    pages = np.arange(100, dtype=np.int32)
    own = [np.concatenate([pages[:4], pages[10 * number : 10 * number + 3]]) for number in range(1, 5)]
    segments = [Segment(1, 50, each) for each in own]
    members = np.full((2, MEMBERS), -1, dtype=np.int32)
    members[0, :2], members[1, :2] = [3, 1], [0, 2]
    tiles = SharedTiles(members, np.array([31, 7], dtype=np.int32))

    found = cascade(segments, tiles, 8, padded=6, most_tiles=2)
    ordinary = cascade([Segment(5, 0, pages), *segments[1:]], SharedTiles(members[:1], tiles.tile_keys[:1]), 8)

    assert found.order.tolist() == [3, 1, 0, 2, 4, 5]
    assert found.shared.rows.tolist() == [0, 2, 2, 6]
    assert found.shared.pages.tolist() == [0, 1, 2, 0, 0]
    assert found.shared.last.tolist() == [8, 1, 1]
    assert found.own.lengths(8).tolist() == [51, 51 - 24, 51, 51 - 24, 1, 1]
    assert ordinary.order.tolist() == [7, 5]
    assert ordinary.own.lengths(8).tolist() == [5, 51 - 24, 51, 51 - 24]
