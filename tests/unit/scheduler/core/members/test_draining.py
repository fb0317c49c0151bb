"""Workers that were asked to end: nothing new, what runs goes on for a while, what is hot is handed over."""

from typing import Any

import pytest

from services.scheduler.core import status
from services.scheduler.core.members.drain import DRAIN_TRANSITIONS, Drain, DrainEvent, DrainState
from shared.errors import IllegalTransition
from shared.messages.storage_plans import BackupPages, SaveChunks
from shared.messages.worker_events import WorkerDraining, WorkerLeft
from shared.messages.worker_plans import AdmitRequest, AttachNeighbour, LeaveCell, PageLoad, PreemptRequest, RunBatch
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, set_heat, timer_of, worker_goes_on


def start_drain(cell: CellModel, worker_id: str = "worker-0", grace_ms: int = 1_000) -> list[Any]:
    """A worker asks to leave; returns what follows at once."""
    cell.workers[worker_id].drain(grace_ms)
    while len(cell.workers[worker_id].outbox) > 1:
        cell.deliver(cell.workers[worker_id])
    cell.deliver(cell.workers[worker_id])
    return cell.outputs[-1]


def hits(cell: CellModel, tier: str) -> int:
    return cell.state.counters.get(f"hit_tokens_{tier}", 0)


def test_an_idle_worker_with_nothing_cached_leaves_at_once(make_cell: MakeCell) -> None:
    """There is nothing to wait for."""
    cell = make_cell(workers=2, host_pages=20)

    outputs = start_drain(cell)

    assert len(orders(outputs, LeaveCell)) == 1
    cell.drain()
    assert list(cell.state.workers) == ["worker-1"]
    assert not cell.timers


def test_a_prefix_that_only_the_leaving_worker_has_is_a_host_hit_afterwards(make_cell: MakeCell) -> None:
    """It is copied before the worker may leave, though nothing was short of room."""
    cell = make_cell(workers=1, host_pages=20)
    cell.serve([1] * 16, max_tokens=1)

    outputs = start_drain(cell)
    assert orders(outputs, LeaveCell) == []
    (order,) = orders(outputs, BackupPages)
    assert len(order.device_pages) // 4 == 4
    cell.drain()
    assert not cell.workers
    cell.add_worker("worker-1")
    cell.serve([1] * 16 + [2], max_tokens=1)

    assert hits(cell, "host") == 16


def test_what_another_worker_or_host_memory_has_is_not_copied(make_cell: MakeCell) -> None:
    """Only what would be lost goes."""
    cell = make_cell(workers=2, pages=64, host_pages=40, host_writes="through")
    cell.serve([1] * 16, max_tokens=1)

    outputs = start_drain(cell)

    assert orders(outputs, BackupPages) == []
    assert len(orders(outputs, LeaveCell)) == 1


def test_the_hottest_goes_first_and_takes_the_place_of_colder_copies(make_cell: MakeCell) -> None:
    """The host pool has room for one of three prefixes, and a colder one in it."""
    cell = make_cell(workers=1, pages=40, host_pages=4, host_writes="on_evict")
    for kind in (1, 2, 3):
        cell.serve([kind] * 16, max_tokens=1)
    for kind, frequency in ((1, 2), (2, 9), (3, 1)):
        set_heat(cell, [kind] * 16, frequency, 5)

    start_drain(cell)
    cell.drain()
    cell.add_worker("worker-1", pages=40)
    for kind in (1, 3, 2):
        cell.serve([kind] * 16 + [7], max_tokens=1)

    assert hits(cell, "host") == 16
    cell.submit([2] * 16 + [8], max_tokens=1)
    assert cell.admitted[-1].cached_tokens == 16


def test_a_hotter_copy_stays_and_what_found_no_room_is_saved_below(make_cell: MakeCell) -> None:
    """Host memory is full of what another worker's requests use more; the disk takes the rest."""
    cell = make_cell(workers=1, page_size=64, pages=8, host_pages=1, disk_chunks=10, disk_writes="on_evict")
    cell.serve([1] * 64 + [5], max_tokens=1)
    start_drain(cell)
    cell.drain()
    cell.add_worker("worker-1", pages=8)
    set_heat(cell, [1] * 64, 9, 9)
    cell.serve([2] * 64 + [5], max_tokens=1)
    set_heat(cell, [2] * 64, 1, 1)

    outputs = start_drain(cell, "worker-1")

    assert orders(outputs, BackupPages) == []
    (save,) = orders(outputs, SaveChunks)
    assert save.worker_id == "worker-1"
    assert orders(outputs, LeaveCell) == []
    cell.drain()
    assert not cell.workers
    assert cell.state.storages["storage"].disk.chunks


def test_a_worker_with_no_storage_leaves_without_handing_over(make_cell: MakeCell) -> None:
    """There is no place for what it holds."""
    cell = make_cell(workers=1)
    cell.serve([1] * 16, max_tokens=1)

    outputs = start_drain(cell)

    assert len(orders(outputs, LeaveCell)) == 1


def test_a_storage_that_is_late_is_not_waited_for(make_cell: MakeCell) -> None:
    """Its deadline ends the hand-over, long before the grace is over."""
    cell = make_cell(workers=1, host_pages=20)
    cell.serve([1] * 16, max_tokens=1)
    start_drain(cell)
    (transfer_id,) = cell.state.transfers

    cell.fire(f"backup.{transfer_id}")

    assert len(orders(cell.outputs[-1], LeaveCell)) == 1


def test_waiting_requests_move_and_new_ones_go_elsewhere(make_cell: MakeCell) -> None:
    """What runs goes on where it is, with its pages and its leases."""
    cell = make_cell(workers=2, pages=64, max_running=1)
    names = [cell.submit([number] * 10, max_tokens=12, ignore_eos=True) for number in range(6)]
    waiting = [name for name in names if cell.state.requests[name].state.value == "waiting"]
    assert any(cell.state.requests[name].worker_id == "worker-0" for name in waiting)

    start_drain(cell)
    names.append(cell.submit([9] * 10, max_tokens=2, ignore_eos=True))

    at = [cell.state.requests[name].worker_id for name in names]
    assert at.count("worker-0") == 1
    cell.drain()
    assert list(cell.workers) == ["worker-1"]
    assert "requests_resumed" not in cell.state.counters
    assert set(cell.gateways["gateway"].ended.values()) == {"finished"}


def test_what_still_runs_late_in_the_grace_starts_again_elsewhere(make_cell: MakeCell) -> None:
    """It is preempted, so that its gateway is asked nothing, and not one token changes."""
    cell = make_cell(workers=2, pages=64)
    name = cell.submit([1] * 10, max_tokens=30, ignore_eos=True)
    for _ in range(6):
        cell.round()
    assert cell.state.requests[name].worker_id == "worker-0"
    start_drain(cell)

    cell.fire(timer_of(cell, "drain."))

    assert len(orders(cell.outputs[-1], PreemptRequest)) == 1
    cell.drain()
    assert list(cell.workers) == ["worker-1"]
    assert "resumes_needed" not in cell.state.counters
    assert cell.gateways["gateway"].ended == {name: "finished"}


def test_a_worker_that_does_not_come_to_an_end_is_let_go(make_cell: MakeCell) -> None:
    """After all of the grace; what it runs goes on elsewhere, as after a loss."""
    cell = make_cell(workers=2, pages=64)
    name = cell.submit([1] * 10, max_tokens=30, ignore_eos=True)
    for _ in range(6):
        cell.round()
    start_drain(cell)
    cell.fire(timer_of(cell, "drain."))
    cell.fire(timer_of(cell, "drain."))
    assert len(orders(cell.outputs[-1], LeaveCell)) == 1
    assert cell.state.counters["drains_cut_short"] == 1

    worker = cell.workers.pop("worker-0")
    cell.feed(WorkerLeft(worker_id="worker-0", incarnation=worker.incarnation))
    cell.drain()

    assert cell.state.counters["requests_resumed"] == 1
    assert cell.gateways["gateway"].ended == {name: "finished"}


def test_requests_wait_while_the_only_worker_drains(make_cell: MakeCell) -> None:
    """They are neither refused nor given to it; the next worker that joins gets them."""
    cell = make_cell(workers=1, pages=64, max_running=1)
    first = cell.submit([1] * 10, max_tokens=6, ignore_eos=True)
    second = cell.submit([2] * 10, max_tokens=6, ignore_eos=True)
    start_drain(cell)
    third = cell.submit([3] * 10, max_tokens=6, ignore_eos=True)
    assert list(cell.state.unplaced) == [second, third]

    cell.drain()
    assert not cell.workers
    cell.add_worker("worker-1", pages=64)
    cell.drain()

    assert cell.gateways["gateway"].ended == dict.fromkeys((first, second, third), "finished")


def test_a_worker_that_dies_while_it_drains_is_lost(make_cell: MakeCell) -> None:
    """Its requests resume, its timer goes, and what was being handed over is free again."""
    cell = make_cell(workers=2, pages=64, host_pages=40)
    cell.serve([5] * 16, max_tokens=1)
    name = cell.submit([1] * 10, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        cell.round()
    holder = cell.state.requests[name].worker_id
    start_drain(cell, holder)

    cell.lose_worker(holder)

    assert not [timer for timer in cell.timers if timer.startswith("drain.")]
    cell.drain()
    assert cell.gateways["gateway"].ended[name] == "finished"


def test_a_worker_waits_for_neighbours_that_read_from_it(make_cell: MakeCell) -> None:
    """CUDA memory goes with the process that made it; and after that nobody begins to read."""
    cell = make_cell(workers=2, pages=64)
    cell.serve([1] * 16, max_tokens=1)
    holder = next(iter(cell.state.tree.nodes[max(cell.state.tree.nodes)].device))
    other = next(name for name in cell.workers if name != holder)
    cell.workers[holder].drain(1_000)
    cell.submit([9], max_tokens=30, ignore_eos=True)  # Keeps it from leaving at once, if it is placed there.
    assert [request.worker_id for request in cell.state.requests.values()] == [holder]
    cell.deliver(cell.workers[holder])
    cell.submit([1] * 16 + [2], max_tokens=1)

    (batch,) = [batch for batch in orders(cell.outputs[-1], RunBatch) if batch.loads]
    assert all(isinstance(load, PageLoad) and load.neighbour_id == holder for load in batch.loads)
    for _ in range(60):
        worker_goes_on(cell, holder)
    assert not orders([output for outputs in cell.outputs for output in outputs], LeaveCell)
    worker_goes_on(cell, other)
    assert len(orders([output for outputs in cell.outputs for output in outputs], LeaveCell)) == 1
    assert cell.state.workers[other].moves.neighbours == {holder: False}
    cell.add_worker("newcomer", pages=64)
    attached = [order.worker_id for order in orders(cell.outputs[-1], AttachNeighbour)]
    assert holder not in attached


def test_the_status_says_who_drains_and_bounds_come_from_the_others(make_cell: MakeCell) -> None:
    """What fits only a worker that is leaving fits nowhere."""
    cell = make_cell(workers=1, pages=16)
    cell.add_worker("large", pages=64)
    cell.submit([1] * 10, max_tokens=60, ignore_eos=True)
    assert status(cell.state, "s").max_context == 256

    start_drain(cell, "large")

    found = status(cell.state, "s")
    assert {worker.worker_id: worker.draining for worker in found.workers} == {"worker-0": False, "large": True}
    assert found.max_context == 64


def test_a_drain_follows_its_table() -> None:
    """A pair that the table lacks raises, and no other does; a worker that is released stays so."""
    for state in DrainState:
        for event in DrainEvent:
            drain = Drain(ends_ns=0, timer_id="", state=state)
            if (state, event) in DRAIN_TRANSITIONS:
                drain.advance(event)
                assert drain.state is DRAIN_TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    drain.advance(event)
    assert not [event for state, event in DRAIN_TRANSITIONS if state is DrainState.RELEASED]


@pytest.mark.parametrize("incarnation", [None, "another"])
def test_a_repeated_or_foreign_message_changes_nothing(make_cell: MakeCell, incarnation: str | None) -> None:
    """One drain is begun, by the incarnation that asked."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([1] * 10, max_tokens=30, ignore_eos=True)
    known = cell.workers["worker-0"].incarnation
    if incarnation is None:
        start_drain(cell)
    before = cell.state.counters.get("drains_started", 0)

    outputs = cell.feed(WorkerDraining(worker_id="worker-0", incarnation=incarnation or known, grace_ms=5))

    assert orders(outputs, (LeaveCell, AdmitRequest)) == []
    assert cell.state.counters.get("drains_started", 0) == before
    assert cell.state.counters["stale_inputs"] == 1
