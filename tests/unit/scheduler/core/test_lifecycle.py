"""A request's lifecycle table."""

import pytest

from services.scheduler.core.lifecycle import TRANSITIONS, RequestEvent, RequestState, next_state
from shared.errors import IllegalTransition


def test_every_missing_entry_is_an_error() -> None:
    """A pair that the table lacks raises, and no other does."""
    for state in RequestState:
        for event in RequestEvent:
            if (state, event) in TRANSITIONS:
                assert next_state(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    next_state(state, event)


def test_every_state_can_be_reached_and_left() -> None:
    """From WAITING every state can be reached, and from every state GONE can."""

    def reachable(start: RequestState) -> list[RequestState]:
        found = [start]
        for state in found:
            found += [after for (before, _), after in TRANSITIONS.items() if before is state and after not in found]
        return found

    assert sorted(state.value for state in reachable(RequestState.WAITING)) == sorted(s.value for s in RequestState)
    for state in RequestState:
        assert RequestState.GONE in reachable(state)


def test_nothing_leaves_gone() -> None:
    """A request that is gone stays gone."""
    assert not [event for state, event in TRANSITIONS if state is RequestState.GONE]
