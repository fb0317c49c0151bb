"""The table of a child's states."""

import pytest

from shared.errors import IllegalTransition
from thermocline.supervisor.lifecycle import TRANSITIONS, Event, State, advance


def test_a_child_that_dies_twice_and_is_stopped() -> None:
    """The usual life, with two restarts."""
    state: State = "waiting"
    events: tuple[Event, ...] = ("started", "died", "started", "died", "started", "stop", "died")
    for event in events:
        state = advance(state, event)

    assert state == "stopped"


def test_a_missing_entry_is_a_typed_error() -> None:
    """A child that was never started cannot die."""
    with pytest.raises(IllegalTransition, match="waiting cannot see 'died'"):
        advance("waiting", "died")


def test_every_state_accepts_stop() -> None:
    """A supervisor may stop at any moment."""
    states = {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values())

    assert {state for state, event in TRANSITIONS if event == "stop"} == states


def test_nothing_leaves_an_end_state() -> None:
    """Stopped and failed children stay so."""
    ends = [target for (state, _), target in TRANSITIONS.items() if state in ("stopped", "failed")]

    assert sorted(ends) == ["failed", "stopped"]
