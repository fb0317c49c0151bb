"""Hotness promotion: what is promoted, and what leaves for it."""

import msgspec
import pytest

from shared.messages.cell_events import CellConfigured, FlushCache
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, set_heat
from tests.unit.scheduler.core.promoting import HOT, counters, filled, node_of, on_device, prefill, promotions


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A full device of colder prompts, and the hottest one in host memory only."""
    return filled(make_cell(pages=32, host_pages=60, promotion="hotness"))


def test_the_hottest_host_root_takes_the_place_of_the_coldest_leaf(cell: CellModel) -> None:
    """After a prefill batch, and with the footprint on the device unchanged."""
    set_heat(cell, [102] * 40, 1, 50)
    before = cell.state.workers["worker-0"].pool.cached
    prefill(cell)
    cell.drain()

    (order,) = promotions(cell)
    assert len(order.host_pages) == len(order.device_pages) == 4 * 10
    assert len(order.identities) == 16 * 10
    assert on_device(cell) == [0, 99, 101, 103]
    assert counters(cell) == [1, 10, 10, 0]
    assert cell.state.workers["worker-0"].pool.cached == before + 1  # The small prompt's page.


def test_a_promoted_prefix_is_a_device_hit(cell: CellModel) -> None:
    """Nobody loads or computes it again."""
    prefill(cell)
    cell.drain()
    cell.serve([*HOT, 7], max_tokens=1)

    assert (cell.admitted[-1].device_tokens, cell.admitted[-1].host_tokens) == (40, 0)


def test_nothing_is_promoted_while_it_is_off(make_cell: MakeCell) -> None:
    """The default moves nothing ahead of demand."""
    cell = filled(make_cell(pages=32, host_pages=60))
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []
    assert cell.state.candidates == {}


def test_a_leaf_that_is_as_hot_stays(make_cell: MakeCell) -> None:
    """Only strictly colder leaves are dropped."""
    cell = filled(make_cell(pages=32, host_pages=60, promotion="hotness"), cold=(9, 200))
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []
    assert on_device(cell) == [99, 101, 102, 103]


def test_as_many_leaves_go_as_make_up_the_pages(make_cell: MakeCell) -> None:
    """Figure 6: several small cold leaves for a larger hot root, the coldest first."""
    cell = make_cell(pages=32, host_pages=60, promotion="hotness")
    cell.serve(HOT, max_tokens=1)
    for number in (101, 102, 103, 104, 105):
        cell.serve([number] * 24, max_tokens=1)
    for heat, number in enumerate((104, 101, 105, 102, 103)):
        set_heat(cell, [number] * 24, 2, 50 + heat)
    set_heat(cell, HOT, 9, 200)
    prefill(cell)
    cell.drain()

    assert on_device(cell) == [0, 99, 102, 103, 105]


def test_free_pages_above_the_reserve_are_filled_first(make_cell: MakeCell) -> None:
    """Nothing is dropped where there is room that nobody uses, and the reserve is left alone."""
    cell = filled(make_cell(pages=64, host_pages=60, promotion="hotness", reserve_fraction=0.6))
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    prefill(cell)
    cell.drain()

    assert counters(cell)[:3] == [1, 20, 0]
    assert cell.state.workers["worker-0"].pool.free >= 0.6 * 64


def test_what_nobody_used_for_long_is_not_promoted(make_cell: MakeCell) -> None:
    """Free pages alone are no reason to move a copy whose clock ran out."""
    cell = filled(make_cell(pages=64, host_pages=60, promotion="hotness", reserve_fraction=0.6))
    for prompt in (HOT, [101] * 40, [102] * 40, [103] * 40):
        set_heat(cell, prompt, 9, 0)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    prefill(cell)
    cell.drain()

    assert promotions(cell) == []


def test_leaves_without_a_copy_are_lost(cell: CellModel) -> None:
    """Victims are discarded without a backup."""
    transfers = cell.state.next_transfer
    prefill(cell)
    cell.drain()

    assert cell.state.next_transfer == transfers
    assert len(on_device(cell)) == 4
    assert sum(bool(node.host) for node in cell.state.tree.nodes.values()) == 1


def test_the_parent_of_a_promoted_node_stays(make_cell: MakeCell) -> None:
    """Even the coldest leaf of the device is no victim for its own child; the child is not promoted instead."""
    cell = make_cell(pages=22, host_pages=60, promotion="hotness")
    cell.serve([1] * 40, max_tokens=1)
    cell.serve([1] * 40 + [2] * 40, max_tokens=1)
    cell.serve([3] * 36, max_tokens=1)
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


def test_a_parent_that_is_bared_may_go_too(make_cell: MakeCell) -> None:
    """A cold chain is dropped from its end as far as the pages are needed."""
    cell = make_cell(pages=34, host_pages=60, promotion="hotness")
    for prompt in (HOT, [1] * 40, [1] * 40 + [2] * 20, [3] * 40, [4] * 28):
        cell.serve(prompt, max_tokens=1)
    assert on_device(cell) == [1, 2, 3, 4]
    set_heat(cell, [1] * 40 + [2] * 20, 1, 1)
    for prompt in ([3] * 40, [4] * 28):
        set_heat(cell, prompt, 9, 255)
    set_heat(cell, HOT, 9, 200)
    prefill(cell)
    cell.drain()

    assert on_device(cell) == [0, 3, 4, 99]


@pytest.mark.parametrize(("criterion", "promoted"), [("hotness", 1), ("recency", 2), ("frequency", 3), ("depth", 4)])
def test_the_criterion_decides_which_is_first(make_cell: MakeCell, criterion: str, promoted: int) -> None:
    """Figure 16: hotness, or the clock, the frequency or the depth alone."""
    cell = make_cell(pages=64, host_pages=90, page_size=16)
    shared = [7] * 16
    heats = {1: (8, 100), 2: (2, 200), 3: (90, 2)}
    for number in heats:
        cell.serve(shared + [number] * 16, max_tokens=1)
    cell.serve([4] * 16, max_tokens=1)
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
    cell.serve([*shared, 5], max_tokens=1)

    order = promotions(cell)[0]
    pool = cell.storages["storage"].pool
    assert pool is not None
    assert pool.memory[int.from_bytes(order.host_pages[:4], "little")].tokens[0] == promoted


def _move_to_host(cell: CellModel) -> None:
    """Push everything out of the device with other prompts, then empty it."""
    for other in range(6):
        cell.serve([200 + other] * 256, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))


def test_a_plan_moves_a_bounded_number_of_tokens(make_cell: MakeCell) -> None:
    """A root that is longer is cut at a page boundary, and its top part goes first."""
    cell = filled(make_cell(pages=32, host_pages=60, promotion="hotness", promotion_tokens=27))
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


def test_a_chain_is_promoted_from_its_top(make_cell: MakeCell) -> None:
    """When a node has arrived, its children in host memory are host roots, for the next plan."""
    cell = make_cell(pages=32, host_pages=60)
    chain = [1] * 40 + [2] * 20
    for prompt in ([1] * 40, chain, [101] * 40, [102] * 40, [103] * 40):
        cell.serve(prompt, max_tokens=1)
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


@pytest.mark.parametrize("policy", ["lru", "hotprefix"])
@pytest.mark.parametrize("admission", ["all", "selective"])
@pytest.mark.parametrize("promotion", ["off", "hotness"])
def test_eviction_admission_and_promotion_are_switched_one_by_one(
    make_cell: MakeCell, policy: str, admission: str, promotion: str
) -> None:
    """Figure 14: E, A and P each change what they are for, whatever the other two are."""
    cell = make_cell(
        pages=32, host_pages=60, policy=policy, admission=admission, promotion=promotion, admission_frequency=3
    )
    for number in (1, 2, 3):
        cell.serve([number] * 36, max_tokens=1)
    set_heat(cell, [1] * 36, 9, 250)
    set_heat(cell, [2] * 36, 1, 1)
    set_heat(cell, [3] * 36, 5, 200)
    cell.serve([4] * 36, max_tokens=1)
    left = 1 if policy == "lru" else 2  # The oldest, or the coldest.
    is_copied = left == 1 or admission == "all"  # The coldest was used once only.
    is_promoted = promotion == "hotness" and left == 1

    assert (left in on_device(cell)) == is_promoted
    assert bool(promotions(cell)) == is_promoted
    assert cell.state.counters.get("host_admitted_pages", 0) == (9 if is_copied else 0)
    assert cell.state.counters.get("host_refused_frequency_pages", 0) == (0 if is_copied else 9)
