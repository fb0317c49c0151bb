"""FlashInfer serves where it computes what the oracle does, captured and not; what is wrong in any part is found."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
import torch

from services.worker.engine.cuda_capture import Capture
from services.worker.engine.flashinfer_graphs import FlashInferGraphs
from services.worker.engine.flashinfer_plans import Kind, Planner
from services.worker.proving.child import try_way
from services.worker.proving.flashinfer_proofs import prove_flashinfer, prove_steps_and_graphs
from services.worker.proving.part import Way, WrongResult
from services.worker.proving.table import ServedShape
from shared.messages.pools import KvGeometry
from tests.cuda import flashinfer_stand_in
from tests.cuda.flashinfer_stand_in import VERSIONS, Machine
from tests.cuda.record_flashinfer import DECODE, PREFILL
from tests.cuda.strict_capture import StrictCapture
from tests.unit.worker.proving.interpreted_parts import StaleCapture

SHAPE = ServedShape(
    device="cpu",
    geometry=KvGeometry(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16"),
    query_heads=4,
    windows=(0, 64),
)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With the latest version of FlashInfer whose signatures are recorded, unless a test names others."""
    made = Machine(version=getattr(request, "param", VERSIONS[-1]))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in.module(made))
    return made


def _prove(machine: Machine, shape: ServedShape = SHAPE) -> None:
    prove_steps_and_graphs(shape, lambda _: StrictCapture(machine))


@pytest.mark.parametrize("machine", VERSIONS, indirect=True)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "page_size", "softcap"),
    [("bfloat16", 4, 2, 16, 0.0), ("float16", 5, 1, 1, 30.0), ("bfloat16", 2, 2, 64, 0.0)],
)
def test_what_is_right_passes(
    machine: Machine, dtype: str, heads: int, kv_heads: int, page_size: int, softcap: float
) -> None:
    """At every page size, with any number of query heads to a KV head, windows and soft caps; in graphs, too."""
    geometry = KvGeometry(layers=2, kv_heads=kv_heads, head_dim=64, page_size=page_size, dtype=dtype)

    _prove(machine, ServedShape(device="cpu", geometry=geometry, query_heads=heads, windows=(0, 64), softcap=softcap))

    assert {DECODE, PREFILL, "merge_state", "merge_state_in_place"} == set(machine.ran)


def _without_merging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["flashinfer"], "merge_state_in_place", lambda *_: None)


def _without_eager_merging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["flashinfer"], "merge_state", lambda v, s, other, sums: (v, s))


def _merging_all_rows(patch: pytest.MonkeyPatch) -> None:
    merge = sys.modules["flashinfer"].merge_state_in_place
    patch.setattr(sys.modules["flashinfer"], "merge_state_in_place", lambda v, s, v2, s2, _: merge(v, s, v2, s2))


def _with_a_longer_window(patch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan

    def wrong(self: Any, wrapper: Any, lists: Any, kind: Kind, heads: int, **settings: Any) -> None:
        longer = kind if kind.window is None else kind._replace(window=kind.window + 1)
        plan(self, wrapper, lists, longer, heads, **settings)

    patch.setattr(Planner, "plan", wrong)


def _with_rows_in_another_order(patch: pytest.MonkeyPatch) -> None:
    send = FlashInferGraphs._send

    def wrong(self: Any, parts: Any) -> Any:
        sent = send(self, parts)
        self._order[: len(parts.order)] = self._order[: len(parts.order)].flip(0)
        return sent

    patch.setattr(FlashInferGraphs, "_send", wrong)


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (_without_merging, "a replayed graph of attention with window none in two parts"),
        (_merging_all_rows, "a replayed graph of attention with window none in two parts"),
        (_with_rows_in_another_order, "a replayed graph of attention with window none in two parts"),
        (_without_eager_merging, "attention of .* with window none"),
        (_with_a_longer_window, "attention of .* with window 64"),
    ],
)
def test_what_is_plausible_and_wrong_is_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, mutate: Any, message: str
) -> None:
    """Results that are not merged, merged where nothing is shared, or merged to another row; a window too long."""
    mutate(monkeypatch)

    with pytest.raises(WrongResult, match=message):
        _prove(machine)


@pytest.mark.usefixtures("machine")
def test_a_graph_that_repeats_nothing_is_found() -> None:
    """As one over memory that has been given away."""

    def capture(_: torch.device) -> Capture:
        return StaleCapture()

    with pytest.raises(WrongResult, match="a replayed graph of attention with window none: "):
        prove_steps_and_graphs(SHAPE, capture)


def test_a_replay_that_was_not_planned_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes on reading the pages of the step that was planned last."""
    plan = FlashInferGraphs.plan

    def first_only(self: Any, segments: Any, tiles: Any, shape: Any) -> None:
        if not segments:
            plan(self, segments, tiles, shape)

    monkeypatch.setattr(FlashInferGraphs, "plan", first_only)

    with pytest.raises(WrongResult, match="a replayed graph of attention"):
        _prove(machine)


def test_planning_in_a_captured_step_is_a_fault(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies to the device from the host, once and for all."""
    see = FlashInferGraphs._see

    def seeing(self: Any, shape: Any, kind: Any, heads: int) -> None:
        see(self, shape, kind, heads)
        self.plan((), None, shape)

    monkeypatch.setattr(FlashInferGraphs, "_see", seeing)

    with pytest.raises(RuntimeError, match="stream is capturing: a plan is made"):
        _prove(machine)


def test_where_it_is_not_or_not_for_such_models_is_said_in_one_line() -> None:
    """As of every way that does not pass."""
    geometry = msgspec.structs.replace(SHAPE.geometry, dtype="float32", head_dim=80)

    tried = try_way(Way("flashinfer", prove_flashinfer), msgspec.structs.replace(SHAPE, geometry=geometry))

    assert tried.attempt.fault == (
        "the package flashinfer-python is not installed; it computes in bfloat16 and float16, not in float32; "
        "it has heads of 64, 128, 256 dimensions, not of 80"
    )
    assert tried.attempt.is_absent
    assert not tried.is_broken


def test_models_with_sinks_or_chunks_are_not_for_it() -> None:
    """The reasons stand before those of the machine."""
    shape = msgspec.structs.replace(SHAPE, chunks=(64,), has_sinks=True)

    tried = try_way(Way("flashinfer", prove_flashinfer), shape)

    assert tried.attempt.is_absent
    assert tried.attempt.fault.startswith(
        "the model has attention sinks, which its paged kernels do not know; "
        "the model attends in chunks, which its paged kernels do not know; "
    )
