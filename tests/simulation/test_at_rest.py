"""What the core may remember when nothing is under way is told from what it may not."""

from __future__ import annotations

import pytest

from services.scheduler.core import CellState, new_state
from tests.simulation.at_rest import BOUNDED, EMPTY, MORE, check_sizes, collections
from tests.simulation.contents import Broken


def test_a_new_state_remembers_nothing() -> None:
    """Before the first input every collection is as small as it must be at rest."""
    check_sizes(new_state())


def test_what_is_under_way_may_not_be_left() -> None:
    """One entry of such a collection is too many."""
    state = new_state()
    state.waiters["request"] = {}

    with pytest.raises(Broken, match=r"state.waiters has 1 entries"):
        check_sizes(state)


def test_what_has_no_bound_of_its_own_is_bounded_by_what_there_is() -> None:
    """A collection that nobody thought of may not grow with history."""
    state = new_state()
    state.key_ids = {f"namespace-{number}": "key" for number in range(MORE + 1)}

    with pytest.raises(Broken, match=r"state.key_ids has"):
        check_sizes(state)


def test_every_collection_of_the_state_is_looked_at() -> None:
    """Those within a dictionary as well, under a path that names no key."""
    state = new_state()
    state.waiters["producer"] = {"request": 64}

    assert dict(collections(state))["waiters.*"] == 1


def test_the_names_of_collections_are_those_of_the_state() -> None:
    """A field that was renamed would not be checked any more."""
    known = set(CellState.__struct_fields__)

    assert {path.split(".")[0] for path in (*EMPTY, *BOUNDED)} <= known
