"""The indexes of selective admission and promotion."""

import random
from collections.abc import Callable, Mapping

from services.scheduler.core import decode_state, encode_state, new_state
from services.scheduler.core.cache.candidates import (
    SETTLED,
    Candidates,
    coldest_of_host,
    index_of,
    note_node,
    put_back,
    refresh,
    take_least,
)
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.state import CellState
from tests.present import present
from tests.unit.scheduler.core.cell_fixtures import MakeCell


def make_index(
    values: Mapping[int, int | None],
) -> tuple[CellState, Candidates, Callable[[int], tuple[float, int] | None]]:
    """An index of nodes with these values, by id, and how they rank as the values change."""
    state = new_state()
    state.tree.nodes = {number: Node(id=number, parent=0, label=b"") for number in values}
    index = Candidates(noted=dict.fromkeys(values))

    def rank_of(node_id: int) -> tuple[float, int] | None:
        value = values.get(node_id)
        return (float(value), 0) if value is not None else None

    return state, index, rank_of


def test_the_least_comes_first() -> None:
    """Nodes are taken in order of their values."""
    state, index, rank_of = make_index({1: 5, 2: 3, 3: 9})
    refresh(state, index, rank_of)

    assert [take_least(index, rank_of) for _ in range(4)] == [((3.0, 0), 2), ((5.0, 0), 1), ((9.0, 0), 3), None]


def test_what_became_hotter_is_passed_over() -> None:
    """A value that rose since it was seen is ranked anew before it is taken."""
    values = {1: 5, 2: 3}
    state, index, rank_of = make_index(values)
    refresh(state, index, rank_of)
    values[2] = 8

    assert take_least(index, rank_of) == ((5.0, 0), 1)
    assert take_least(index, rank_of) == ((8.0, 0), 2)


def test_what_cooled_down_unnoticed_is_found_within_a_round() -> None:
    """Each choice looks at a few nodes in turn, so that no rank stays old for long."""
    values = dict.fromkeys(range(200), 100)
    state, index, rank_of = make_index(values)
    while index.noted:
        state.last_seq += 1
        refresh(state, index, rank_of)
    values[150] = 1
    for _ in range(200 // 8 + 1):
        state.last_seq += 1
        refresh(state, index, rank_of)

    assert take_least(index, rank_of) == ((1.0, 0), 150)


def test_a_node_that_may_not_be_chosen_is_left_out_until_it_is_noted() -> None:
    """Whoever asks does not see it, and nothing is kept of it."""
    values = {1: 5, 2: None}
    state, index, rank_of = make_index(values)
    refresh(state, index, rank_of)
    values[1] = None

    assert take_least(index, rank_of) is None
    assert index.latest == {}


def test_put_back_undoes_a_taking() -> None:
    """The next one to ask gets the same."""
    state, index, rank_of = make_index({1: 5})
    refresh(state, index, rank_of)
    rank, node_id = present(take_least(index, rank_of))
    put_back(index, rank, node_id)

    assert take_least(index, rank_of) == ((5.0, 0), 1)


def test_one_refresh_ranks_a_bounded_number() -> None:
    """However many were noted, a step of the fold stays short."""
    state, index, rank_of = make_index(dict.fromkeys(range(10_000), 1))
    refresh(state, index, rank_of)
    refresh(state, index, rank_of)

    assert len(index.latest) == SETTLED


def test_an_index_stays_in_proportion_to_the_tree() -> None:
    """Neither changed ranks nor nodes that are gone pile up."""
    values = dict.fromkeys(range(100), 1)
    state, index, rank_of = make_index(values)
    state.candidates[coldest_of_host("storage")] = index
    chance = random.Random(1)
    for number in range(100, 5000):
        gone = chance.choice(list(values))
        del values[gone], state.tree.nodes[gone]
        values[number] = number
        node = state.tree.nodes[number] = Node(id=number, parent=0, label=b"")
        node.host = ("storage",)
        note_node(state, node)
        state.last_seq = number
        refresh(state, index, rank_of)

    assert len(index.latest) <= 2 * 100 + 64
    assert len(index.entries) <= 2 * len(index.latest) + 64 + SETTLED
    assert len(index.noted) <= 2 * 100 + 64


def test_an_index_is_made_when_it_is_asked_for(make_cell: MakeCell) -> None:
    """Until then no change of a node costs anything; then every node that may be chosen is in it."""
    cell = make_cell(pages=14, host_pages=60)
    for number in range(3):
        cell.serve([number] * 40, max_tokens=1)

    assert cell.state.candidates == {}
    index = index_of(cell.state, coldest_of_host("storage"), lambda node: bool(node.host))
    assert list(index.noted) == [node.id for node in cell.state.tree.nodes.values() if node.host]
    assert index.noted


def test_indexes_are_part_of_the_snapshot(make_cell: MakeCell) -> None:
    """A fold that goes on from a snapshot chooses alike."""
    cell = make_cell(pages=14, host_pages=15, admission="selective", admission_frequency=0)
    for number in range(6):
        cell.serve([number] * 40, max_tokens=1)

    assert coldest_of_host("storage") in cell.state.candidates
    assert encode_state(decode_state(encode_state(cell.state))) == encode_state(cell.state)
