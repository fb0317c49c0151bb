"""Making room."""

from typing import Any

import pytest

from services.scheduler.core.cache.eviction import POLICIES, Evictable, LruPolicy, Moment
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import drop_host
from shared.errors import InvariantViolated
from shared.messages.cell_events import FlushCache
from shared.messages.storage_plans import BackupPages
from shared.messages.worker_plans import RunBatch
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders


def test_a_reserve_is_kept_free_ahead_of_need(make_cell: MakeCell) -> None:
    """With a host tier, eviction starts before anybody waits for pages."""
    cell = make_cell(pages=40, host_pages=100, reserve_fraction=0.25)
    for number in range(6):
        cell.serve([number] * 36, max_tokens=1)

    assert cell.state.workers["worker-0"].pool.free >= 10


def test_without_a_host_tier_nothing_is_evicted_ahead(make_cell: MakeCell) -> None:
    """Dropping takes no time, so the cache stays full."""
    cell = make_cell(pages=40, reserve_fraction=0.25)
    for number in range(6):
        cell.serve([number] * 36, max_tokens=1)

    assert cell.state.workers["worker-0"].pool.free < 10


def test_the_front_of_a_long_node_outlives_its_end(make_cell: MakeCell) -> None:
    """Only as much as is needed is evicted, from the end."""
    cell = make_cell(page_size=1, pages=2000)
    cell.serve(list(range(1900)), max_tokens=1)
    cell.serve([5000] * 150, max_tokens=1)

    cell.submit(list(range(1900)), max_tokens=1)

    assert cell.admitted[-1].cached_tokens == 1900 - 256


def test_pages_in_use_cannot_make_room(make_cell: MakeCell) -> None:
    """What running requests share or own does not count."""
    cell = make_cell(pages=20)
    cell.submit([1] * 40, max_tokens=20, ignore_eos=True)
    for _ in range(2):
        cell.round()
    worker = cell.state.workers["worker-0"]

    assert worker.pool.cached == worker.pool.locked == 10
    assert worker.pool.can_free(worker.pool.free)
    assert not worker.pool.can_free(worker.pool.free + 1)


class Silent(LruPolicy):
    """Names no node."""

    name = "silent"

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        return None


def test_a_policy_may_name_no_node_only_where_none_may_leave(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in use are no fault of its; a request that waits for others is."""
    monkeypatch.setitem(POLICIES, Silent.name, Silent)
    cell = make_cell(pages=20, policy=Silent.name)
    cell.submit([1] * 40, max_tokens=20, ignore_eos=True)
    for _ in range(2):
        cell.round()
    cell.submit([2] * 40, max_tokens=1)
    cell.round()

    def go_on() -> None:
        while cell.state.requests:
            cell.round()

    with pytest.raises(InvariantViolated, match=r"policy 'silent' named no node of worker-0, though \d+ may leave"):
        go_on()


A, B = [1] * 40, [2] * 40


@pytest.fixture
def chain(make_cell: MakeCell) -> CellModel:
    """A cell whose device holds a node and its child, and little else."""
    cell = make_cell(pages=26, host_pages=60)
    for prompt in (A, A + B):
        cell.serve(prompt, max_tokens=1)
    return cell


def node_of(cell: CellModel, token: int) -> Node:
    return next(node for node in cell.state.tree.nodes.values() if node.parent and node.tokens[0] == token)


def answer_backup(cell: CellModel) -> None:
    cell.storages["storage"].step()
    cell.deliver(cell.storages["storage"])


def test_a_chain_leaves_in_one_transfer(chain: CellModel) -> None:
    """A parent does not wait until its children's backup was answered before its own begins."""
    chain.submit([3] * 80, request_id="next", max_tokens=1)
    outputs = chain.outputs[-1]

    (order,) = orders(outputs, BackupPages)
    assert len(order.host_pages) // 4 == 20
    answer_backup(chain)
    assert chain.admitted[-1].request_id == "next"
    assert [bool(node_of(chain, token).host) for token in (1, 2)] == [True, True]
    assert not node_of(chain, 1).device


def test_a_parent_that_is_used_meanwhile_stays(chain: CellModel) -> None:
    """Its child leaves without it."""
    chain.submit([3] * 80, max_tokens=1)
    chain.submit([*A, 7], max_tokens=8, ignore_eos=True, priority=1, request_id="user")
    assert (chain.admitted[-1].request_id, chain.admitted[-1].device_tokens) == ("user", 40)
    answer_backup(chain)

    assert node_of(chain, 1).device
    assert not node_of(chain, 2).device
    chain.drain()


def test_a_parent_that_has_a_copy_leaves_with_its_child(chain: CellModel) -> None:
    """Nothing is copied for it, but it waits for its child."""
    chain.feed(FlushCache(call_id="call"))
    for prompt in (A, [4] * 96, A + B):  # The second pushes the first out, and the third loads it again.
        chain.serve(prompt, max_tokens=1)
    assert node_of(chain, 1).host
    assert node_of(chain, 1).device
    assert not node_of(chain, 2).host
    chain.submit([3] * 96, request_id="next", max_tokens=1)
    outputs = chain.outputs[-1]

    (order,) = orders(outputs, BackupPages)
    assert len(order.host_pages) // 4 == 10
    answer_backup(chain)
    assert chain.admitted[-1].request_id == "next"
    assert [bool(node_of(chain, token).device) for token in (1, 2)] == [False, False]
    assert [bool(node_of(chain, token).host) for token in (1, 2)] == [True, True]


def test_a_parent_whose_copy_went_meanwhile_stays(chain: CellModel) -> None:
    """Otherwise the copies below it, just made, could never be reached."""
    chain.feed(FlushCache(call_id="call"))
    for prompt in (A, [4] * 96, A + B):
        chain.serve(prompt, max_tokens=1)
    chain.submit([3] * 96, max_tokens=1)
    drop_host(chain.state, node_of(chain, 1), chain.state.storages["storage"])
    answer_backup(chain)

    assert node_of(chain, 2).host
    assert node_of(chain, 1).device
    chain.drain()


def test_a_chain_whose_backup_fails_is_dropped(chain: CellModel) -> None:
    """Eviction goes on without copies, children first."""
    chain.submit([3] * 80, request_id="next", max_tokens=1)
    chain.storages["storage"].step(backups_succeed=False)
    chain.deliver(chain.storages["storage"])

    assert chain.admitted[-1].request_id == "next"
    assert len(chain.state.tree.nodes) == 0


def backed_up(outputs: list[Any]) -> int:
    """Nodes of which backups were ordered; here each has one page."""
    return sum(len(order.host_pages) // 4 for order in orders(outputs, BackupPages))


@pytest.fixture
def crumbs(make_cell: MakeCell) -> MakeCell:
    """Build a cell whose device is full of nodes of one page."""

    def make(**config: Any) -> CellModel:
        cell = make_cell(pages=96, host_pages=200, **config)
        for number in range(90):
            cell.serve([number + 1] * 4, max_tokens=1)
        return cell

    return make


def test_one_step_evicts_a_bounded_number_of_nodes(crumbs: MakeCell) -> None:
    """A prompt that needs many small nodes' pages gets them over several backups, and runs."""
    cell = crumbs()
    cell.submit([500] * 320, max_tokens=1, request_id="large")

    assert 0 < backed_up(cell.outputs[-1]) <= 32
    cell.drain()
    assert cell.gateways["gateway"].ended["large"] == "finished"


def test_a_reserve_is_filled_a_few_nodes_at_a_time(crumbs: MakeCell) -> None:
    """What nobody waits for yet goes on with the worker's later inputs, until the reserve is there."""
    cell = crumbs(reserve_fraction=0.5)

    assert all(backed_up(outputs) <= 8 for outputs in cell.outputs)
    assert cell.state.workers["worker-0"].pool.free >= 48


def test_a_step_that_admits_many_leaves_the_reserve_to_the_next(make_cell: MakeCell) -> None:
    """Nothing is evicted ahead of need in the step of a large batch; the inputs after it fill the reserve again."""
    cell = make_cell(pages=96, host_pages=200, reserve_fraction=0.5, batches_ahead=1)
    for number in range(40):
        cell.serve([number + 1] * 4, max_tokens=1)
    worker = cell.workers["worker-0"]
    cell.submit([900], max_tokens=1)  # Its batch is on its way, so the others must wait.
    for number in range(4):
        cell.submit([600 + number] * 40, max_tokens=1)
    worker.step()
    cell.deliver(worker)
    (batch,) = orders(cell.outputs[-1], RunBatch)

    assert len(batch.chunks) == 4
    assert cell.state.workers["worker-0"].pool.free < 48
    assert not orders(cell.outputs[-1], BackupPages)
    cell.drain()
    assert cell.state.workers["worker-0"].pool.free >= 48


def test_pages_that_a_backup_frees_are_counted_until_somebody_uses_them(chain: CellModel) -> None:
    """A node under backup that is locked meanwhile does not leave; check_invariants counts anew after each step."""
    worker = chain.state.workers["worker-0"]
    chain.submit([3] * 80, max_tokens=1)
    assert worker.moves.leaving == 20
    chain.submit([*A, 7], max_tokens=8, ignore_eos=True, priority=1)

    assert worker.moves.leaving == 10
    answer_backup(chain)
    assert worker.moves.leaving == 0
