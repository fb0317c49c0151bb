"""Hotness promotion: while one is under way, and when it ends."""

import pytest

from services.scheduler.core import check_invariants, decode_state, encode_state, status
from services.scheduler.core.cache.residency import split_node
from shared.errors import InvariantViolated
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache, PinPrefix
from shared.messages.worker_events import PagesPromoted
from shared.messages.worker_plans import RunBatch
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, host_pool, set_heat, worker_goes_on
from tests.unit.scheduler.core.promoting import HOT, counters, filled, node_of, on_device, prefill, promotions


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A full device of colder prompts, and the hottest one in host memory only."""
    return filled(make_cell(pages=32, host_pages=60, promotion="hotness"))


def test_a_node_in_a_plan_is_unavailable(cell: CellModel) -> None:
    """A request that wants it waits for it; it is neither loaded a second time nor computed."""
    prefill(cell)
    node = node_of(cell, 0)
    assert "worker-0" in node.loading
    assert node.host_locks == {"storage": 1}
    cell.submit([*HOT, 7], max_tokens=1, request_id="wants it")
    cell.workers["worker-0"].step()

    assert cell.admitted[-1].request_id != "wants it"
    cell.drain()
    assert (cell.admitted[-1].request_id, cell.admitted[-1].device_tokens) == ("wants it", 40)


def test_one_promotion_at_a_time(cell: CellModel) -> None:
    """A second batch that prefills something starts no second plan before the first is answered."""
    prefill(cell)
    prefill(cell, [98] * 4)

    assert len(promotions(cell)) == 1
    assert cell.state.workers["worker-0"].moves.is_promotion_due


def test_a_promotion_does_not_go_before_a_load(make_cell: MakeCell) -> None:
    """While a batch is loading, the link belongs to the request that waits for it."""
    cell = make_cell(pages=32, host_pages=60, promotion="hotness")
    for number in (101, 102, 103, 104, 105):
        cell.serve([number] * 40, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    for number in (101, 102):
        set_heat(cell, [number] * 40, 9, 200)
    before = len(promotions(cell))
    cell.submit([97] * 4, max_tokens=1)
    cell.submit([101] * 41, max_tokens=1)
    worker = cell.workers["worker-0"]
    plans = [plan.order for plan in worker.inbox if isinstance(plan.order, RunBatch)]
    assert [bool(order.loads) for order in plans] == [False, True]
    worker_goes_on(cell, worker.worker_id)

    assert len(promotions(cell)) == before
    cell.drain()
    assert len(promotions(cell)) > before


def test_a_promotion_that_failed_leaves_everything_as_it_was(cell: CellModel) -> None:
    """Its pages are free again, and the copies can be loaded."""
    prefill(cell)
    assert cell.state.workers["worker-0"].pool.leased == 10
    cell.workers["worker-0"].promote(is_ok=False)
    cell.drain()

    assert counters(cell) == [1, 0, 10, 1]
    assert cell.state.workers["worker-0"].pool.leased == 0
    node = node_of(cell, 0)
    assert node.host
    assert not node.host_locks
    cell.serve([*HOT, 7], max_tokens=1)
    assert cell.admitted[-1].host_tokens == 40


def test_rotten_pages_are_quarantined(cell: CellModel) -> None:
    """A copy that failed verification is never matched again."""
    assert cell.storages["storage"].pool is not None
    for page in cell.storages["storage"].pool.memory.values():
        page.is_corrupt = True
    prefill(cell)
    cell.drain()

    assert cell.state.counters["promotions_failed"] == 1
    assert cell.state.counters["quarantined_pages"] == 10
    assert host_pool(cell).cached == 0
    cell.serve([*HOT, 7], max_tokens=1)
    assert cell.admitted[-1].cached_tokens == 0


def test_a_pin_lets_go_of_rotten_pages(cell: CellModel) -> None:
    """Otherwise its lock would keep the bad copy, and what is computed anew would never be backed up."""
    pin = PinPrefix(pin_id="p", namespace=namespace(), tokens=pack_int32(HOT), ttl_ms=60_000)
    cell.feed(pin)
    assert node_of(cell, 0).host_locks == {"storage": 1}
    pool = cell.storages["storage"].pool
    assert pool is not None
    for page in pool.memory.values():
        page.is_corrupt = True
    prefill(cell)
    cell.drain()
    assert cell.state.counters["promotions_failed"] == 1

    assert not any(node.quarantined for node in cell.state.tree.nodes.values())
    assert cell.state.pins["p"].pages == 0
    for prompt in (HOT, *([number] * 40 for number in (104, 105, 106))):
        cell.serve(prompt, max_tokens=1)
    assert node_of(cell, 0).host
    assert cell.state.pins["p"].pages == 10


@pytest.mark.parametrize("promotion_id", [1, 77])
def test_a_repeated_answer_changes_nothing(cell: CellModel, promotion_id: int) -> None:
    """Nor does one to a promotion that never was, nor one of a worker's former life."""
    prefill(cell)
    cell.drain()
    worker = cell.workers["worker-0"]
    for incarnation in (worker.incarnation, "another"):
        before = encode_state(cell.state)
        cell.feed(PagesPromoted(worker_id="worker-0", incarnation=incarnation, promotion_id=promotion_id, ok=False))
        after = decode_state(before)
        after.last_seq, after.now_ns = cell.state.last_seq, cell.state.now_ns
        after.counters["stale_inputs"] = after.counters.get("stale_inputs", 0) + 1

        assert encode_state(cell.state) == encode_state(after)


def test_an_answer_to_another_promotion_is_stale(cell: CellModel) -> None:
    """The one that is under way goes on."""
    prefill(cell)
    worker = cell.workers["worker-0"]
    cell.feed(PagesPromoted(worker_id="worker-0", incarnation=worker.incarnation, promotion_id=77, ok=True))

    assert node_of(cell, 0).loading
    assert cell.state.counters["stale_inputs"] == 1
    cell.drain()


def test_what_was_promoted_is_not_the_first_to_leave(cell: CellModel) -> None:
    """To a policy that goes by last use, a promotion counts as one."""
    prefill(cell)
    cell.drain()
    cell.serve([104] * 40, max_tokens=1)

    assert 0 in on_device(cell)
    assert len(promotions(cell)) == 1


def test_a_lost_worker_ends_its_promotion(cell: CellModel) -> None:
    """The copies are readable again for the others."""
    prefill(cell)
    cell.lose_worker("worker-0")

    node = node_of(cell, 0)
    assert not node.loading
    assert not node.host_locks
    cell.add_worker("worker-0", pages=32)
    cell.drain()
    assert all(pool.leased == 0 for pool in status(cell.state, "x").pools)


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_promotion_survives_the_loss_of_its_storage(cell: CellModel, is_ok: bool) -> None:
    """What the worker has copied is good; what it could not copy is gone with the storage."""
    prefill(cell)
    worker = cell.workers["worker-0"]
    worker.step()
    if is_ok:
        worker.promote()
    cell.lose_storage("storage")
    cell.drain()
    cell.serve([*HOT, 7], max_tokens=1)

    assert cell.admitted[-1].cached_tokens == (40 if is_ok else 0)
    assert cell.state.workers["worker-0"].pool.leased == 0


def test_a_flush_leaves_a_promotion_alone(cell: CellModel) -> None:
    """Its copies are being read; they can be flushed after the answer."""
    prefill(cell)
    cell.feed(FlushCache(call_id="call"))
    assert node_of(cell, 0).loading
    cell.drain()
    cell.feed(FlushCache(call_id="again"))

    assert cell.state.tree.nodes == {}


def test_a_node_that_is_cut_under_a_promotion_is_promoted_whole(cell: CellModel) -> None:
    """Another worker's request may need a part of it meanwhile; both parts arrive."""
    prefill(cell)
    upper = split_node(cell.state, node_of(cell, 0), 4)
    check_invariants(cell.state)
    cell.drain()

    assert upper.device
    assert cell.state.counters["promoted_pages"] == 10
    cell.serve([*HOT, 7], max_tokens=1)
    assert cell.admitted[-1].device_tokens == 40


def test_a_promotion_without_its_nodes_is_found(cell: CellModel) -> None:
    """The checker knows whose the pages of a promotion are, and who holds the copies that it reads."""
    prefill(cell)
    check_invariants(cell.state)
    assert cell.state.workers["worker-0"].moves.promotion is not None
    cell.state.workers["worker-0"].moves.promotion.storage_id = ""

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)
    cell.state.workers["worker-0"].moves.promotion = None
    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)


def test_a_running_request_is_not_preempted_for_a_promotion(make_cell: MakeCell) -> None:
    """Where the pages of a promotion would do, a lease waits for its answer."""
    cell = make_cell(pages=24, host_pages=60, promotion="hotness")
    for prompt in (HOT, [101] * 40, [102] * 40):
        cell.serve(prompt, max_tokens=1)
    set_heat(cell, HOT, 9, 200)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    for seed in (1, 2):
        cell.submit([50 + seed] * 4, max_tokens=40, ignore_eos=True, seed=seed)
    for _ in range(50):
        worker_goes_on(cell)

    assert len(promotions(cell)) == 1
    assert cell.state.workers["worker-0"].lease_waits
    cell.drain()
    assert cell.state.counters.get("preemptions", 0) == 0
