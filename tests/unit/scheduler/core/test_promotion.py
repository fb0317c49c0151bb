"""Hotness promotion."""

import msgspec
import pytest

from services.scheduler.core import check_invariants, decode_state, encode_state, status
from services.scheduler.core.residency import split_node
from shared.errors import InvariantViolated
from shared.messages.cell_events import CellConfigured, FlushCache
from shared.messages.worker_events import PagesPromoted
from shared.messages.worker_plans import PromotePages, RunBatch

HOT = list(range(40))
SMALL = [99] * 4


@pytest.fixture
def cell(make_cell, set_heat):
    """A full device of colder prompts, and the hottest one in host memory only."""
    return filled(make_cell(pages=32, host_pages=60, promotion="hotness"), set_heat)


def filled(cell, set_heat, *, hot=(9, 200), cold=(2, 100)):
    for prompt in (HOT, *([number] * 40 for number in (101, 102, 103))):
        cell.submit(prompt, max_tokens=1)
        cell.drain()
    for number in (101, 102, 103):
        set_heat(cell, [number] * 40, *cold)
    set_heat(cell, HOT, *hot)
    assert node_of(cell, 0).host
    assert not node_of(cell, 0).device
    return cell


def node_of(cell, token):
    """The topmost node that begins with this token."""
    return next(node for node in cell.state.tree.nodes.values() if node.parent and node.tokens[0] == token)


def prefill(cell, prompt=SMALL):
    """Let a worker compute a small prompt, so that a promotion is due; what follows is up to the caller."""
    cell.submit(prompt, max_tokens=1)
    for _ in range(2):
        for storage in cell.storages.values():
            storage.step()
            cell.deliver(storage)
        worker = cell.workers["worker-0"]
        worker.step()
        while cell.deliver(worker):
            pass


def promotions(cell):
    """Every promotion ordered so far."""
    plans = [getattr(output, "order", None) for outputs in cell.outputs for output in outputs]
    return [order for order in plans if isinstance(order, PromotePages)]


def on_device(cell):
    """First tokens of what is on the device."""
    return sorted({node.tokens[0] for node in cell.state.tree.nodes.values() if node.device})


def counters(cell):
    names = ("promotions_started", "promoted_pages", "promotion_evicted_pages", "promotions_failed")
    return [cell.state.counters.get(name, 0) for name in names]


def test_the_hottest_host_root_takes_the_place_of_the_coldest_leaf(cell, set_heat):
    """After a prefill batch, and with the footprint on the device unchanged."""
    set_heat(cell, [102] * 40, 1, 50)
    before = cell.state.workers["worker-0"].pool.cached
    prefill(cell)
    cell.drain()
    cell.check_answers()

    (order,) = promotions(cell)
    assert len(order.host_pages) == len(order.device_pages) == 4 * 10
    assert len(order.identities) == 16 * 10
    assert on_device(cell) == [0, 99, 101, 103]
    assert counters(cell) == [1, 10, 10, 0]
    assert cell.state.workers["worker-0"].pool.cached == before + 1  # The small prompt's page.


def test_a_promoted_prefix_is_a_device_hit(cell):
    """Nobody loads or computes it again."""
    prefill(cell)
    cell.drain()
    cell.submit([*HOT, 7], max_tokens=1)
    cell.drain()
    cell.check_answers()

    assert (cell.admitted[-1].device_tokens, cell.admitted[-1].host_tokens) == (40, 0)


def test_nothing_is_promoted_while_it_is_off(make_cell, set_heat):
    """The default moves nothing ahead of demand."""
    cell = filled(make_cell(pages=32, host_pages=60), set_heat)
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []
    assert cell.state.candidates == {}


def test_a_leaf_that_is_as_hot_stays(make_cell, set_heat):
    """Only strictly colder leaves are dropped."""
    cell = filled(make_cell(pages=32, host_pages=60, promotion="hotness"), set_heat, cold=(9, 200))
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []
    assert on_device(cell) == [99, 101, 102, 103]


def test_as_many_leaves_go_as_make_up_the_pages(make_cell, set_heat):
    """Figure 6: several small cold leaves for a larger hot root, the coldest first."""
    cell = make_cell(pages=32, host_pages=60, promotion="hotness")
    cell.submit(HOT, max_tokens=1)
    cell.drain()
    for number in (101, 102, 103, 104, 105):
        cell.submit([number] * 24, max_tokens=1)
        cell.drain()
    for heat, number in enumerate((104, 101, 105, 102, 103)):
        set_heat(cell, [number] * 24, 2, 50 + heat)
    set_heat(cell, HOT, 9, 200)
    prefill(cell)
    cell.drain()

    assert on_device(cell) == [0, 99, 102, 103, 105]


def test_free_pages_above_the_reserve_are_filled_first(make_cell, set_heat):
    """Nothing is dropped where there is room that nobody uses, and the reserve is left alone."""
    cell = filled(make_cell(pages=64, host_pages=60, promotion="hotness", reserve_fraction=0.6), set_heat)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    prefill(cell)
    cell.drain()

    assert counters(cell)[:3] == [1, 20, 0]
    assert cell.state.workers["worker-0"].pool.free >= 0.6 * 64


def test_what_nobody_used_for_long_is_not_promoted(make_cell, set_heat):
    """Free pages alone are no reason to move a copy whose clock ran out."""
    cell = filled(make_cell(pages=64, host_pages=60, promotion="hotness", reserve_fraction=0.6), set_heat)
    for prompt in (HOT, [101] * 40, [102] * 40, [103] * 40):
        set_heat(cell, prompt, 9, 0)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []


def test_leaves_without_a_copy_are_lost(cell):
    """Victims are discarded without a backup."""
    transfers = cell.state.next_transfer
    prefill(cell)
    cell.drain()

    assert cell.state.next_transfer == transfers
    assert len(on_device(cell)) == 4
    assert sum(bool(node.host) for node in cell.state.tree.nodes.values()) == 1


def test_a_node_in_a_plan_is_unavailable(cell):
    """A request that wants it waits for it; it is neither loaded a second time nor computed."""
    prefill(cell)
    node = node_of(cell, 0)
    assert "worker-0" in node.loading
    assert node.host_locks == {"storage": 1}
    cell.submit([*HOT, 7], max_tokens=1, request_id="wants it")
    cell.workers["worker-0"].step()

    assert cell.admitted[-1].request_id != "wants it"
    cell.drain()
    cell.check_answers()
    assert (cell.admitted[-1].request_id, cell.admitted[-1].device_tokens) == ("wants it", 40)


def test_one_promotion_at_a_time(cell, set_heat):
    """A second batch that prefills something starts no second plan before the first is answered."""
    prefill(cell)
    prefill(cell, [98] * 4)

    assert len(promotions(cell)) == 1
    assert cell.state.workers["worker-0"].is_promotion_due


def test_a_promotion_does_not_go_before_a_load(make_cell, set_heat):
    """While a batch is loading, the link belongs to the request that waits for it."""
    cell = make_cell(pages=32, host_pages=60, promotion="hotness")
    for number in (101, 102, 103, 104, 105):
        cell.submit([number] * 40, max_tokens=1)
        cell.drain()
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    for number in (101, 102):
        set_heat(cell, [number] * 40, 9, 200)
    before = len(promotions(cell))
    cell.submit([97] * 4, max_tokens=1)
    cell.submit([101] * 41, max_tokens=1)
    worker = cell.workers["worker-0"]
    plans = [plan.order for plan in worker.inbox if isinstance(plan.order, RunBatch)]
    assert [bool(order.loads) for order in plans] == [False, True]
    worker.step()
    while cell.deliver(worker):
        pass

    assert len(promotions(cell)) == before
    cell.drain()
    assert len(promotions(cell)) > before


def test_the_parent_of_a_promoted_node_stays(make_cell, set_heat):
    """Even the coldest leaf of the device is no victim for its own child; the child is not promoted instead."""
    cell = make_cell(pages=22, host_pages=60, promotion="hotness")
    cell.submit([1] * 40, max_tokens=1)
    cell.drain()
    cell.submit([1] * 40 + [2] * 40, max_tokens=1)
    cell.drain()
    cell.submit([3] * 36, max_tokens=1)
    cell.drain()
    assert on_device(cell) == [1, 3]
    assert node_of(cell, 2).host
    assert not node_of(cell, 2).device
    set_heat(cell, [1] * 40 + [2] * 40, 9, 200)
    set_heat(cell, [1] * 40, 1, 1)
    set_heat(cell, [3] * 36, 9, 255)
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []
    assert on_device(cell) == [1, 3, 99]


def test_a_parent_that_is_bared_may_go_too(make_cell, set_heat):
    """A cold chain is dropped from its end as far as the pages are needed."""
    cell = make_cell(pages=34, host_pages=60, promotion="hotness")
    for prompt in (HOT, [1] * 40, [1] * 40 + [2] * 20, [3] * 40, [4] * 28):
        cell.submit(prompt, max_tokens=1)
        cell.drain()
    assert on_device(cell) == [1, 2, 3, 4]
    set_heat(cell, [1] * 40 + [2] * 20, 1, 1)
    for prompt in ([3] * 40, [4] * 28):
        set_heat(cell, prompt, 9, 255)
    set_heat(cell, HOT, 9, 200)
    prefill(cell)
    cell.drain()

    assert on_device(cell) == [0, 3, 4, 99]


@pytest.mark.parametrize(("criterion", "promoted"), [("hotness", 1), ("recency", 2), ("frequency", 3), ("depth", 4)])
def test_the_criterion_decides_which_is_first(make_cell, set_heat, criterion, promoted):
    """Figure 16: hotness, or the clock, the frequency or the depth alone."""
    cell = make_cell(pages=64, host_pages=90, page_size=16)
    shared = [7] * 16
    heats = {1: (8, 100), 2: (2, 200), 3: (90, 2)}
    for number in heats:
        cell.submit(shared + [number] * 16, max_tokens=1)
        cell.drain()
    cell.submit([4] * 16, max_tokens=1)
    cell.drain()
    _move_to_host(cell)
    for number, heat in heats.items():
        set_heat(cell, shared + [number] * 16, *heat)
    set_heat(cell, [4] * 16, 1, 1)
    set_heat(cell, shared, 1, 1)
    for node in cell.state.tree.nodes.values():
        if node.parent and node.tokens[0] >= 200:
            cell.state.hotness.put(node.digest, 1, 0, 1)  # The prompts that pushed the others out.
    config = msgspec.structs.replace(cell.state.config, promotion=criterion, promotion_tokens=16)
    cell.feed(CellConfigured(config=config))
    cell.submit([*shared, 5], max_tokens=1)
    cell.drain()

    order = promotions(cell)[0]
    pool = cell.storages["storage"].pool
    assert pool.memory[int.from_bytes(order.host_pages[:4], "little")].tokens[0] == promoted


def _move_to_host(cell):
    """Push everything out of the device with other prompts, then empty it."""
    for other in range(6):
        cell.submit([200 + other] * 256, max_tokens=1)
        cell.drain()
    cell.feed(FlushCache(call_id="call", tiers=("device",)))


def test_a_plan_moves_a_bounded_number_of_tokens(make_cell, set_heat):
    """A root that is longer is cut at a page boundary, and its top part goes first."""
    cell = filled(make_cell(pages=32, host_pages=60, promotion="hotness", promotion_tokens=27), set_heat)
    prefill(cell)
    cell.drain()

    assert counters(cell)[:2] == [1, 6]
    node = node_of(cell, 0)
    assert node.device
    assert len(node.tokens) // 4 == 24
    set_heat(cell, HOT, 9, 200)
    prefill(cell, [98] * 4)
    cell.drain()
    assert counters(cell)[:2] == [2, 10]


def test_a_promotion_that_failed_leaves_everything_as_it_was(cell):
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
    cell.submit([*HOT, 7], max_tokens=1)
    cell.drain()
    cell.check_answers()
    assert cell.admitted[-1].host_tokens == 40


def test_rotten_pages_are_quarantined(cell):
    """A copy that failed verification is never matched again."""
    for page in cell.storages["storage"].pool.memory.values():
        page.is_corrupt = True
    prefill(cell)
    cell.drain()

    assert cell.state.counters["promotions_failed"] == 1
    assert cell.state.counters["quarantined_pages"] == 10
    assert cell.state.storages["storage"].pool.cached == 0
    cell.submit([*HOT, 7], max_tokens=1)
    cell.drain()
    cell.check_answers()
    assert cell.admitted[-1].cached_tokens == 0


@pytest.mark.parametrize("promotion_id", [1, 77])
def test_a_repeated_answer_changes_nothing(cell, promotion_id):
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


def test_an_answer_to_another_promotion_is_stale(cell):
    """The one that is under way goes on."""
    prefill(cell)
    worker = cell.workers["worker-0"]
    cell.feed(PagesPromoted(worker_id="worker-0", incarnation=worker.incarnation, promotion_id=77, ok=True))

    assert node_of(cell, 0).loading
    assert cell.state.counters["stale_inputs"] == 1
    cell.drain()


def test_what_was_promoted_is_not_the_first_to_leave(cell):
    """To a policy that goes by last use, a promotion counts as one."""
    prefill(cell)
    cell.drain()
    cell.submit([104] * 40, max_tokens=1)
    cell.drain()

    assert 0 in on_device(cell)
    assert len(promotions(cell)) == 1


def test_a_chain_is_promoted_from_its_top(make_cell, set_heat):
    """When a node has arrived, its children in host memory are host roots, for the next plan."""
    cell = make_cell(pages=32, host_pages=60)
    chain = [1] * 40 + [2] * 20
    for prompt in ([1] * 40, chain, [101] * 40, [102] * 40, [103] * 40):
        cell.submit(prompt, max_tokens=1)
        cell.drain()
    assert on_device(cell) == [101, 102, 103]
    set_heat(cell, chain, 9, 255)
    cell.feed(CellConfigured(config=msgspec.structs.replace(cell.state.config, promotion="hotness")))
    prefill(cell)
    cell.drain()
    assert 1 in on_device(cell)
    assert 2 not in on_device(cell)
    prefill(cell, [98] * 4)
    cell.drain()

    assert 2 in on_device(cell)


def test_a_lost_worker_ends_its_promotion(cell):
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
def test_a_promotion_survives_the_loss_of_its_storage(cell, is_ok):
    """What the worker has copied is good; what it could not copy is gone with the storage."""
    prefill(cell)
    worker = cell.workers["worker-0"]
    worker.step()
    if is_ok:
        worker.promote()
    cell.lose_storage("storage")
    cell.drain()
    cell.submit([*HOT, 7], max_tokens=1)
    cell.drain()
    cell.check_answers()

    assert cell.admitted[-1].cached_tokens == (40 if is_ok else 0)
    assert cell.state.workers["worker-0"].pool.leased == 0


def test_a_flush_leaves_a_promotion_alone(cell):
    """Its copies are being read; they can be flushed after the answer."""
    prefill(cell)
    cell.feed(FlushCache(call_id="call"))
    assert node_of(cell, 0).loading
    cell.drain()
    cell.feed(FlushCache(call_id="again"))

    assert cell.state.tree.nodes == {}


def test_a_node_that_is_cut_under_a_promotion_is_promoted_whole(cell):
    """Another worker's request may need a part of it meanwhile; both parts arrive."""
    prefill(cell)
    upper = split_node(cell.state, node_of(cell, 0), 4)
    check_invariants(cell.state)
    cell.drain()

    assert upper.device
    assert cell.state.counters["promoted_pages"] == 10
    cell.submit([*HOT, 7], max_tokens=1)
    cell.drain()
    assert cell.admitted[-1].device_tokens == 40


def test_a_promotion_without_its_nodes_is_found(cell):
    """The checker knows whose the pages of a promotion are, and who holds the copies that it reads."""
    prefill(cell)
    check_invariants(cell.state)
    cell.state.workers["worker-0"].promotion.storage_id = ""

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)
    cell.state.workers["worker-0"].promotion = None
    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)


def test_a_running_request_is_not_preempted_for_a_promotion(make_cell, set_heat):
    """Where the pages of a promotion would do, a lease waits for its answer."""
    cell = make_cell(pages=24, host_pages=60, promotion="hotness")
    for prompt in (HOT, [101] * 40, [102] * 40):
        cell.submit(prompt, max_tokens=1)
        cell.drain()
    set_heat(cell, HOT, 9, 200)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    for seed in (1, 2):
        cell.submit([50 + seed] * 4, max_tokens=40, ignore_eos=True, seed=seed)
    worker = cell.workers["worker-0"]
    for _ in range(50):
        worker.step()
        while cell.deliver(worker):
            pass

    assert len(promotions(cell)) == 1
    assert cell.state.workers["worker-0"].lease_waits
    cell.drain()
    cell.check_answers()
    assert cell.state.counters.get("preemptions", 0) == 0


@pytest.mark.parametrize("policy", ["lru", "hotprefix"])
@pytest.mark.parametrize("admission", ["all", "selective"])
@pytest.mark.parametrize("promotion", ["off", "hotness"])
def test_eviction_admission_and_promotion_are_switched_one_by_one(make_cell, set_heat, policy, admission, promotion):
    """Figure 14: E, A and P each change what they are for, whatever the other two are."""
    cell = make_cell(
        pages=32, host_pages=60, policy=policy, admission=admission, promotion=promotion, admission_frequency=3
    )
    for number in (1, 2, 3):
        cell.submit([number] * 36, max_tokens=1)
        cell.drain()
    set_heat(cell, [1] * 36, 9, 250)
    set_heat(cell, [2] * 36, 1, 1)
    set_heat(cell, [3] * 36, 5, 200)
    cell.submit([4] * 36, max_tokens=1)
    cell.drain()
    left = 1 if policy == "lru" else 2  # The oldest, or the coldest.
    is_copied = left == 1 or admission == "all"  # The coldest was used once only.
    is_promoted = promotion == "hotness" and left == 1

    assert (left in on_device(cell)) == is_promoted
    assert bool(promotions(cell)) == is_promoted
    assert cell.state.counters.get("host_admitted_pages", 0) == (9 if is_copied else 0)
    assert cell.state.counters.get("host_refused_frequency_pages", 0) == (0 if is_copied else 9)
