"""A lost pool is struck from the tree in slices, and counts as absent from the first."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.scheduler.core import decode_state, encode_state, status
from services.scheduler.core.cache import residency
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.fold import configure
from services.scheduler.core.members import pools
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache, TimerFired, WorkerLost
from shared.messages.storage_plans import CreateHostPool
from shared.messages.worker_events import WorkerDraining
from shared.messages.worker_plans import LeaveCell, RunBatch
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, worker_goes_on

PROMPTS = 12


@pytest.fixture(autouse=True)
def _in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step strikes a node or two."""
    monkeypatch.setattr(pools, "STRIKE_UNITS", 4)
    monkeypatch.setattr(configure, "FLUSH_UNITS", 8)


def filled(make_cell: MakeCell, **options: int) -> CellModel:
    """A cell whose first worker has answered some prompts that share nothing."""
    cell = make_cell(pages=200, **options)
    for number in range(PROMPTS):
        cell.serve([number] * 40, max_tokens=1)
    return cell


def steps_until_struck(cell: CellModel) -> int:
    """Let the timer come due until nothing is left to strike; returns how often."""
    count = 0
    while cell.state.lost:
        cell.fire("strike")
        count += 1
    return count


def test_what_a_lost_worker_held_is_struck_in_bounded_steps(make_cell: MakeCell) -> None:
    """No step removes more than a few nodes, and in the end none is left."""
    cell = filled(make_cell)
    sizes = [len(cell.state.tree.nodes)]

    cell.lose_worker("worker-0")
    while cell.state.lost:
        sizes.append(len(cell.state.tree.nodes))
        cell.fire("strike")

    assert max(before - after for before, after in pairwise(sizes)) <= 2
    assert len(sizes) > PROMPTS // 2
    assert not cell.state.tree.nodes
    assert "strike" not in cell.state.timers


def test_a_request_reuses_nothing_of_a_lost_device(make_cell: MakeCell) -> None:
    """The tree still names its pages, and the prompt is computed anew by who is left, into the same node."""
    cell = filled(make_cell)
    cell.add_worker("worker-1", pages=200)
    cell.lose_worker("worker-0")
    (match,) = match_prefix(cell.state.tree, namespace(""), pack_int32([3] * 40), 10)
    assert list(match[0].device) == ["worker-0"]

    cell.submit([3] * 40, max_tokens=1)
    for _ in range(10):
        worker_goes_on(cell, "worker-1")

    assert cell.admitted[-1].cached_tokens == 0
    assert list(match[0].device) == ["worker-0", "worker-1"]
    steps_until_struck(cell)
    assert list(match[0].device) == ["worker-1"]
    assert len(cell.state.tree.nodes) == 2  # The root and this one.


def test_a_worker_that_comes_back_meanwhile_waits_for_its_name(make_cell: MakeCell) -> None:
    """It is let in by the step that strikes the last node, with an empty pool."""
    cell = filled(make_cell)

    again = cell.add_worker("worker-0", pages=200)

    assert not cell.state.workers
    assert cell.state.arriving["worker-0"].incarnation == again.incarnation
    cell.state = decode_state(encode_state(cell.state))
    steps_until_struck(cell)
    assert cell.state.workers["worker-0"].incarnation == again.incarnation
    assert not cell.state.arriving
    cell.serve([3] * 40, max_tokens=1)


def test_a_worker_that_is_lost_again_while_it_waits_is_forgotten(make_cell: MakeCell) -> None:
    """So is one in whose place another one came, and one that waits cannot join twice."""
    cell = filled(make_cell)
    second = cell.add_worker("worker-0", pages=200)
    third = cell.add_worker("worker-0", pages=200)

    cell.feed(WorkerLost(worker_id="worker-0", incarnation=second.incarnation))
    assert cell.state.arriving["worker-0"].incarnation == third.incarnation
    cell.feed(WorkerLost(worker_id="worker-0", incarnation=third.incarnation))

    assert not cell.state.arriving
    steps_until_struck(cell)
    assert not cell.state.workers


def test_a_worker_that_is_to_end_while_it_waits_may_leave_at_once(make_cell: MakeCell) -> None:
    """It was never let in and holds nothing."""
    cell = filled(make_cell)
    again = cell.add_worker("worker-0", pages=200)

    outputs = cell.feed(WorkerDraining(worker_id="worker-0", incarnation=again.incarnation, grace_ms=1000))

    assert len(orders(outputs, LeaveCell)) == 1
    assert not cell.state.arriving


def test_two_losses_at_once_are_struck_one_after_the_other(make_cell: MakeCell) -> None:
    """A node that only lost pools name goes when the first of them is struck."""
    cell = make_cell(pages=24, host_pages=300, workers=2)
    for number in range(PROMPTS):
        cell.serve([number] * 40, max_tokens=1)

    cell.lose_worker("worker-0")
    cell.lose_storage("storage")
    cell.lose_worker("worker-1")

    assert list(cell.state.lost) == ["device/worker-0", "host/storage", "device/worker-1"]
    steps_until_struck(cell)
    assert not cell.state.tree.nodes


def test_a_storage_gets_its_next_pool_when_the_last_was_struck(make_cell: MakeCell) -> None:
    """It joins at once, for its disk is of use; nothing is loaded from what it had."""
    cell = make_cell(pages=12, host_pages=300)
    for number in range(PROMPTS):
        cell.serve([number] * 40, max_tokens=1)
    cell.lose_storage("storage")
    assert "host/storage" in cell.state.lost
    joined = cell.seq

    cell.add_storage("storage", pages=300)
    cell.submit([0] * 40, max_tokens=1)

    assert "storage" in cell.state.storages
    said = [output for outputs in cell.outputs[joined:] for output in outputs]
    assert orders(said, CreateHostPool) == []
    assert [batch.loads for batch in orders(said, RunBatch)] == [()]
    steps_until_struck(cell)
    assert len(orders(cell.outputs[-1], CreateHostPool)) == 1
    cell.drain()
    assert [pool.total for pool in status(cell.state, "x").pools if pool.tier == "host"] == [300]


def test_a_first_worker_of_another_geometry_waits_until_the_tree_is_empty(make_cell: MakeCell) -> None:
    """Nodes of pages of another size cannot be told apart by page."""
    cell = make_cell(pages=12, host_pages=300)
    for number in range(PROMPTS):
        cell.serve([number] * 40, max_tokens=1)
    cell.lose_worker("worker-0")
    steps_until_struck(cell)
    assert cell.state.tree.nodes
    cell.page_size = 8

    cell.add_worker("worker-0", pages=12)

    assert not cell.state.workers
    steps_until_struck(cell)
    assert not cell.state.tree.nodes
    assert cell.state.tree.page_size == 8
    assert list(cell.state.workers) == ["worker-0"]


def test_copies_below_a_node_that_is_gone_are_removed_in_slices(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No match reaches them; their pages come back as they are struck."""
    monkeypatch.setattr(residency, "MOST_PRUNED", 2)
    cell = make_cell(pages=40, host_pages=300)
    for number in range(PROMPTS):
        cell.serve([7] * 16 + [number] * 24, max_tokens=1)
    state = cell.state
    storage, worker = state.storages["storage"], state.workers["worker-0"]
    (top,) = [node for node in state.tree.nodes.values() if len(node.child_ids) == PROMPTS]
    for node_id in list(top.child_ids):
        node = state.tree.nodes[node_id]
        if "storage" not in node.host:
            pages = storage.pool.allocate(len(node.tokens) // 4 // cell.page_size) if storage.pool else None
            assert pages
            residency.give_host(state, node, storage, pages)
        if "worker-0" in node.device:
            residency.drop_device(state, node, worker)

    if "storage" in top.host:
        residency.drop_host(state, top, storage)
    residency.drop_device(state, top, worker)
    cell.feed(TimerFired(timer_id="nothing"))

    assert len(state.tree.nodes) > PROMPTS
    assert steps_until_struck(cell) > PROMPTS // 2
    assert not state.tree.nodes
    assert storage.pool is not None
    assert storage.pool.free == storage.pool.total


def test_a_flush_of_a_large_tree_takes_several_steps(make_cell: MakeCell) -> None:
    """A snapshot in the middle goes on with it, and a repeated order adds nothing to what has not begun."""
    cell = filled(make_cell, host_pages=300)
    before = len(cell.state.tree.nodes)

    cell.feed(FlushCache(call_id="x"))
    assert before - 3 <= len(cell.state.tree.nodes) < before
    waiting = len(cell.state.flushes)
    cell.feed(FlushCache(call_id="y", tiers=("host",)))
    assert len(cell.state.flushes) == waiting
    cell.state = decode_state(encode_state(cell.state))
    while cell.state.flushes:
        cell.fire("flush")

    assert not cell.state.tree.nodes
    assert [pool.cached for pool in status(cell.state, "x").pools] == [0, 0]


def test_small_losses_are_struck_at_once(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is set, so that recordings of small cells replay."""
    monkeypatch.undo()
    cell = filled(make_cell)

    cell.lose_worker("worker-0")

    assert not cell.state.tree.nodes
    assert not cell.state.lost
    assert "strike" not in cell.state.timers


def test_settings_may_change_while_a_pool_is_struck(make_cell: MakeCell) -> None:
    """A policy that begins anew hears nothing of the lost pool."""
    cell = filled(make_cell)
    cell.add_worker("worker-1", pages=200)
    cell.lose_worker("worker-0")

    cell.feed(CellConfigured(config=CellConfig(policy="lru", lease_tokens=4)))

    assert "device/worker-0" not in cell.state.orders
    steps_until_struck(cell)
    assert not cell.state.tree.nodes
