"""The bounds of the hotness filter."""

from collections.abc import Callable

import pytest

from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.hotness.tracking import MOST_ENTRIES, base_bits_for, make_room_in_filter
from services.scheduler.core.cache.prefix_tree import Node, add_child, root_of
from services.scheduler.core.state import CellState, new_state
from shared.messages.base import pack_int32
from tests.unit.scheduler.core.cell_fixtures import MakeCell


def touched(state: CellState, digest: int) -> int:
    """Touch a prefix and make room for it if need be; returns how often that was."""
    times = 0
    while not state.hotness.touch(digest, 1):
        assert make_room_in_filter(state)
        times += 1
    return times


@pytest.fixture
def small() -> tuple[CellState, Callable[..., Node]]:
    """A state with a filter of 64 entries and a tree, and a function that adds a node to it."""
    state = new_state()
    state.tree.page_size = 16
    state.hotness = HotnessFilter(base_bits=4, fingerprint_bits=24, growth_bits=2)
    root = root_of(state.tree, "namespace")

    def add() -> Node:
        node = add_child(state.tree, root, pack_int32([len(root.child_ids)] * 16))
        touched(state, node.digest)
        return node

    return state, add


def test_prefixes_that_never_come_back_do_not_make_it_grow(small: tuple[CellState, Callable[..., Node]]) -> None:
    """However many there were, the filter stays as large as the tree needs, and what is cached stays known."""
    state, add = small
    nodes = [add() for _ in range(10)]
    for number in range(2000):
        touched(state, number)

    assert state.hotness.capacity == 64
    assert state.counters["hotness_forgotten"] > 1000
    assert all(state.hotness.lookup(node.digest)[0] == 1 for node in nodes)


def test_it_forgets_the_cold_before_the_warm(small: tuple[CellState, Callable[..., Node]]) -> None:
    """A prefix that is used again and again outlives thousands that were used once, cached or not."""
    state, _ = small
    for number in range(2000):
        touched(state, number)
        if number % 10 == 0:
            touched(state, 2**63)
        if number % 100 == 0:
            state.hotness.age()

    assert state.hotness.lookup(2**63)[0] == 200


def test_it_grows_with_the_tree_and_keeps_everything(small: tuple[CellState, Callable[..., Node]]) -> None:
    """More nodes than half its entries double it; every node keeps its frequency."""
    state, add = small
    nodes = [add() for _ in range(150)]
    for node in nodes[:50]:
        touched(state, node.digest)

    assert state.hotness.capacity == 256
    assert state.counters["hotness_growths"] == 2
    assert [state.hotness.lookup(node.digest)[0] for node in nodes] == [2] * 50 + [1] * 100


def test_it_is_rebuilt_from_the_tree_once_it_cannot_double(small: tuple[CellState, Callable[..., Node]]) -> None:
    """Nodes keep their values and may double it again; what was evicted is forgotten then."""
    state, add = small
    nodes = [add() for _ in range(250)]
    for node in nodes:
        touched(state, node.digest)

    assert state.counters["hotness_rebuilds"] == 1
    assert state.hotness.base_bits == 7
    assert state.hotness.capacity == 512
    assert all(state.hotness.lookup(node.digest) == (2, 255) for node in nodes)


def test_there_is_always_room_for_the_tree(small: tuple[CellState, Callable[..., Node]]) -> None:
    """Whatever its size, no node goes unknown, and the filter is less than four times as large."""
    state, add = small
    for _ in range(400):
        add()
        assert state.hotness.occupied <= state.hotness.capacity
        assert "hotness_overflows" not in state.counters
    assert state.hotness.capacity < 4 * 400


def test_it_remembers_what_the_pools_can_hold_and_more(make_cell: MakeCell) -> None:
    """Pools of 1,048,576 tokens get an entry for every 16 of them, and forget no prefix of all those that left."""
    cell = make_cell(page_size=16, pages=65_536)
    for number in range(60_000):
        touched(cell.state, number)

    assert cell.state.hotness.capacity == 65_536
    assert "hotness_forgotten" not in cell.state.counters
    assert cell.state.hotness.doublings == 0


def test_a_pool_that_joins_later_doubles_it_and_nothing_is_forgotten(make_cell: MakeCell) -> None:
    """What was remembered before is known with its values; a pool that leaves takes no entry along."""
    cell = make_cell(page_size=16, pages=65_536)
    touched(cell.state, 7)
    cell.add_worker("worker-9", pages=65_536)
    assert cell.state.hotness.capacity == 131_072
    assert cell.state.hotness.lookup(7) == (1, 255)

    cell.lose_worker("worker-9")
    assert cell.state.hotness.capacity == 131_072


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [(0, 16_384), (2**18, 16_384), (2**18 + 64, 32_768), (2**20, 65_536), (2**26, MOST_ENTRIES), (2**40, MOST_ENTRIES)],
)
def test_entries_follow_from_tokens(tokens: int, entries: int) -> None:
    """One for every 16 tokens, rounded up to a power of two, within bounds."""
    assert 4 << base_bits_for(tokens) == entries
