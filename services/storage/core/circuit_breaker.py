"""The circuit breaker of a store that does not answer, as a table.

=========  =========  =========  ====================================================================
from       event      to         what happened
=========  =========  =========  ====================================================================
closed     succeeded  closed     an answer; earlier failures in a row no longer count
closed     failed     closed     one more failure in a row, fewer than open it
closed     tripped    open       the failure that opens it
open       cooled     half_open  the cool-down is over: who asks now is the probe, others fail at once
half_open  succeeded  closed     the probe was answered
half_open  failed     open       the probe was not; the cool-down begins again
half_open  released   open       the probe ended without a verdict; the next call is the probe
=========  =========  =========  ====================================================================

A call that began before the breaker opened may end after it: each call holds the number of its term, and reports
of an earlier term change nothing.
"""

from __future__ import annotations

from typing import Final, Literal

from shared.errors import IllegalTransition

BreakerState = Literal["closed", "open", "half_open"]
BreakerEvent = Literal["succeeded", "failed", "tripped", "cooled", "released"]
Verdict = Literal["succeeded", "failed", "released"]

TRANSITIONS: Final[dict[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    ("closed", "succeeded"): "closed",
    ("closed", "failed"): "closed",
    ("closed", "tripped"): "open",
    ("open", "cooled"): "half_open",
    ("half_open", "succeeded"): "closed",
    ("half_open", "failed"): "open",
    ("half_open", "released"): "open",
}


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """Return the state to which ``event`` leads from ``state``. Raises IllegalTransition for a missing entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a breaker that is {state} cannot be {event}") from None


class CircuitBreaker:
    """The breaker of one store, with the states of the table above. Times are seconds of one clock. Not thread-safe."""

    def __init__(self, *, failures_to_open: int, cool_down_s: float) -> None:
        """Begin closed: ``failures_to_open`` failures in a row open it, for ``cool_down_s`` seconds."""
        self._failures_to_open = failures_to_open
        self._cool_down_s = cool_down_s
        self._failures = 0
        self._opened_s = 0.0
        self._term = 0
        self.state: BreakerState = "closed"

    def admit(self, now_s: float) -> int | None:
        """Return the term for a call, to be given to :meth:`report` once; None if the call must fail at once.

        An open breaker whose cool-down is over becomes half-open, with the caller as its probe.
        """
        if self.state == "open" and self.remaining_s(now_s) == 0.0:
            self._enter("cooled")
            return self._term
        return self._term if self.state == "closed" else None

    def report(self, term: int, verdict: Verdict, now_s: float) -> None:
        """Record the outcome of a call that was admitted: ``released`` if it says nothing about the store."""
        if term != self._term or (self.state == "closed" and verdict == "released"):
            return
        if verdict != "failed":
            self._failures = 0 if verdict == "succeeded" else self._failures
            self._enter(verdict)
            return
        self._failures += 1
        is_last_straw = self.state == "closed" and self._failures >= self._failures_to_open
        self._enter("tripped" if is_last_straw else "failed")
        if self.state == "open":
            self._opened_s = now_s

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until a probe may go out; 0 unless the breaker is open."""
        if self.state != "open":
            return 0.0
        return max(0.0, self._opened_s + self._cool_down_s - now_s)

    def _enter(self, event: BreakerEvent) -> None:
        state = next_state(self.state, event)
        if state != self.state:
            self._term += 1
        self.state = state
