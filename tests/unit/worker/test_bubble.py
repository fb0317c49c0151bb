"""When a bubble ends, by arithmetic, and which orders may be carried out in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.bubble import Pace, fill, fits, may_overtake, should_start, stall_ns, standing_on
from services.worker.kv.layer_gate import LayerGate
from services.worker.kv.loads import Progress
from shared.messages.pools import PoolHandle
from shared.messages.worker_plans import AttachHostPool, DetachHostPool, RestoreChunk, WorkerOrder
from tests.unit.worker.driven_executor import abort, admit, batch, chunk, extend, load, preempt, promote
from tests.unit.worker.fake_model import GEOMETRY
from tests.unit.worker.made_requests import decoding, made_sparse, make_request


def progress(
    released: int, released_after_ns: int = 0, since_ns: int = 0, *, is_rejected: bool = False, has_ended: bool = False
) -> Progress:
    """Of ten layers and 100 pages."""
    return Progress(
        layers=10,
        pages=100,
        released=released,
        released_after_ns=released_after_ns,
        since_ns=since_ns,
        is_rejected=is_rejected,
        has_ended=has_ended,
    )


def test_without_computation_the_stall_is_what_remains_of_the_load() -> None:
    """Four of ten layers took 400 ns, so six more take 600."""
    assert stall_ns(progress(4, 400), 0, Pace()) == 600
    assert stall_ns(progress(4, 400, since_ns=70), 0, Pace()) == 530
    assert stall_ns(progress(10, 1000), 0, Pace()) == 0


def test_computation_hides_the_load_of_later_layers() -> None:
    """Only the first layer that has not landed is waited for when computation is the slower of the two."""
    pace = Pace(row_ns=100)

    # 20 rows take 2000 ns, 200 a layer; layer 4 is wanted after 800 ns and lands after 100.
    assert stall_ns(progress(4, 400), 20, pace) == 0
    # Nothing has landed and earlier loads took 1 ns a page: the first layer takes 100 ns, and is wanted at once.
    assert stall_ns(progress(0), 20, Pace(row_ns=100, page_ns=1)) == 100
    # 5 rows take 500 ns, 50 a layer: the last layer is wanted after 450 ns and lands after 600.
    assert stall_ns(progress(4, 400), 5, pace) == 150


def test_a_layer_that_is_late_is_expected_any_moment() -> None:
    """Its time does not make the layers after it come earlier."""
    assert stall_ns(progress(4, 400, since_ns=5000), 0, Pace()) == 500


@given(released=st.integers(0, 10), load=st.integers(1, 1000), since=st.integers(0, 2000), rows=st.integers(0, 50))
def test_the_stall_is_the_worst_of_all_layers(released: int, load: int, since: int, rows: int) -> None:
    """The closed form agrees with a walk over the layers."""
    pace = Pace(row_ns=10, page_ns=load / 100)
    compute = rows * 10 / 10
    landing = [max(0.0, load - since) + (layer - released) * load for layer in range(released, 10)]
    waits = [at - layer * compute for layer, at in enumerate(landing, released)]

    found = stall_ns(progress(released, released * load, since), rows, pace)

    assert found == pytest.approx(max([0.0, *waits]))


def test_chunks_start_when_a_decode_step_would_cost_more_than_the_stall() -> None:
    """The bound errs towards starting; a load of which nothing is known is not bet on."""
    pace = Pace(decode_ns=600)

    assert should_start(progress(4, 400), 0, pace)
    assert not should_start(progress(3, 300), 0, pace)
    assert not should_start(progress(0), 0, pace)
    assert should_start(progress(0), 0, Pace(decode_ns=600, page_ns=0.5))


def test_after_a_failed_load_decoding_goes_on_to_the_end() -> None:
    """The pass would be thrown away; once nothing is written any more, what is left of the batch begins."""
    pace = Pace(decode_ns=10_000)

    assert not should_start(progress(4, 400, is_rejected=True), 0, pace)
    assert should_start(progress(4, 400, is_rejected=True, has_ended=True), 0, pace)


@dataclass
class ScriptedTransfer:
    """Shows one state of the load after another; the last one stays."""

    states: Sequence[Progress]
    gate: LayerGate = field(default_factory=lambda: LayerGate(timeout_s=60))
    looks: int = 0

    @property
    def progress(self) -> Progress:
        self.looks += 1
        return self.states[min(self.looks, len(self.states)) - 1]


def ticking() -> Callable[[], int]:
    """A clock that is one microsecond later at each look."""
    return itertools.count(0, 1000).__next__


def test_a_bubble_lasts_until_the_load_has_ended() -> None:
    """It sums up its steps and their tokens."""
    transfer = ScriptedTransfer([progress(0), progress(0), progress(0), progress(10, 5, has_ended=True)])

    bubble = fill(transfer, 5, Pace(), lambda: 2, ticking())

    assert (bubble.ns, bubble.tokens) == (3000, 6)


def test_a_bubble_ends_when_nothing_decodes() -> None:
    """Then the chunks may as well wait at the gate."""
    tokens = iter([3, 1, 0])

    bubble = fill(ScriptedTransfer([progress(0)]), 5, Pace(), lambda: next(tokens), ticking())

    assert bubble.tokens == 4


def test_a_bubble_ends_when_a_layer_is_overdue() -> None:
    """A load that hangs does not keep its batch from recomputing for ever."""
    now = [0]
    transfer = ScriptedTransfer([progress(0)], LayerGate(timeout_s=1, clock_ns=lambda: now[0]))

    def decode() -> int:
        now[0] += 400_000_000
        return 1

    bubble = fill(transfer, 5, Pace(), decode, ticking())

    assert bubble.tokens == 3
    assert transfer.gate.rejected is not None


def test_batches_go_before_decode_steps() -> None:
    """They are offered what is left of the stall, and the bubble ends when the load has."""
    pace = Pace(row_ns=100, page_ns=200)
    transfer = ScriptedTransfer([progress(0), progress(2, 800), progress(2, 800), progress(10, 5, has_ended=True)])
    offered: list[float] = []

    def prefill(room_ns: float) -> bool:
        offered.append(room_ns)
        return len(offered) == 1

    bubble = fill(transfer, 5, pace, lambda: 2, ticking(), prefill)

    assert offered == [stall_ns(each, 5, pace) for each in transfer.states[:3]]
    assert bubble.tokens == 4


def test_after_a_failed_load_any_batch_fits() -> None:
    """Nothing waits for the load any more but its end."""
    offered: list[float] = []
    transfer = ScriptedTransfer([progress(4, 400, is_rejected=True), progress(10, 5, has_ended=True)])

    def prefill(room_ns: float) -> bool:
        offered.append(room_ns)
        return True

    fill(transfer, 5, Pace(), lambda: 0, ticking(), prefill)

    assert offered == [float("inf")]


def test_a_step_fits_as_long_as_its_rows_take_no_longer() -> None:
    """By the pace of earlier steps; without any everything fits."""
    assert fits(10, 1000, Pace(row_ns=100))
    assert not fits(11, 1000, Pace(row_ns=100))
    assert fits(11, 0, Pace())


HANDLE = PoolHandle(kind="shm", layout="page_first", name="x", nbytes=1, pages=1, geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("order", "may"),
    [
        (extend([1], request_id="d"), True),
        (abort("d"), True),
        (preempt("d"), True),
        (admit([3, 4], [1], request_id="d"), True),
        (promote([3, 4, 5, 6], [0], [0], [9]), True),
        (extend([1], request_id="r"), False),
        (abort("r"), False),
        (preempt("shared"), False),
        (admit([3, 4], [1], request_id="r", attempt=2), False),
        (batch(chunk(0, 4, request_id="d")), False),
        (DetachHostPool(storage_id="s"), False),
        (AttachHostPool(storage_id="s", handle=HANDLE), False),
    ],
)
def test_orders_that_cannot_conflict_go_ahead_of_a_loading_batch(order: WorkerOrder, may: bool) -> None:
    """Those for requests of the batch, other batches and changes of host pools wait for it."""
    loading = batch(chunk(4, 6, request_id="r"), loads=[load([3, 4, 5, 6], [0], [0], [7], request_id="shared")])

    assert may_overtake(order, loading) is may


def test_orders_for_a_restored_request_wait() -> None:
    """It is part of the batch like any other."""
    restored = RestoreChunk(
        request_id="restored", attempt=1, start=0, end=4, storage_id="s", hidden_pages=b"", identities=b""
    )
    loading = batch(loads=[load([3, 4, 5, 6], [0], [0], [7], request_id="r")], restores=[restored])

    assert not may_overtake(preempt("restored"), loading)
    assert may_overtake(preempt("another"), loading)


def test_requests_on_loading_pages_are_left_out() -> None:
    """Only of those that decode; the others compute nothing in a bubble."""
    decode = decoding()
    decode.request_id = "d"

    assert standing_on([decode, make_request()], {8, 40}) == {"d"}
    assert standing_on([decode, make_request()], {40}) == frozenset()


def test_requests_whose_chosen_tokens_lie_on_loading_pages_are_left_out() -> None:
    """What was chosen of a sparse prefix is in pages outside of the page table, whose entries of -1 are none."""
    request = made_sparse()
    request.change("compute")
    request.change("sample")

    assert standing_on([request], {30, 99}) == {"r"}
    assert standing_on([request], {-1, 99}) == frozenset()
