"""What a step answers: numbered plans and notices to publish, and timers for the shell to keep."""

from __future__ import annotations

from dataclasses import dataclass

from shared.codec import Published


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Append ``TimerFired(timer_id)`` to the stream once its clock reaches ``at_ns``; set again, it moves."""

    timer_id: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget a timer. One that has fired already is harmless: the core ignores what it no longer waits for."""

    timer_id: str


Output = Published | SetTimer | CancelTimer
