"""The life of a supervised child as a table. Pure.

::

    waiting ──started──▶ running ──died──▶ backing_off ──started──▶ running
                            │  ╲              │
                           stop  gave_up    stop
                            ▼      ▼          ▼
                         stopping  failed   stopped      stopping ──died──▶ stopped
"""

from __future__ import annotations

from typing import Literal

from shared.errors import IllegalTransition

State = Literal["waiting", "running", "backing_off", "stopping", "stopped", "failed"]
Event = Literal["started", "died", "gave_up", "stop"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("waiting", "started"): "running",
    ("waiting", "gave_up"): "failed",
    ("waiting", "stop"): "stopped",
    ("running", "died"): "backing_off",
    ("running", "gave_up"): "failed",
    ("running", "stop"): "stopping",
    ("backing_off", "started"): "running",
    ("backing_off", "gave_up"): "failed",
    ("backing_off", "stop"): "stopped",
    ("stopping", "died"): "stopped",
    ("stopping", "stop"): "stopping",
    ("stopped", "stop"): "stopped",
    ("failed", "stop"): "failed",
}


def advance(state: State, event: Event) -> State:
    """Return the state after ``event``. Raises IllegalTransition if the table lacks the entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a child that is {state} cannot see {event!r}") from None
