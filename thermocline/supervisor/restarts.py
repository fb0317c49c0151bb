"""Rules for restarting ended processes and for giving up. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_REFUSED = 2  # See shared.lifecycle: the process refuses to start, and would refuse again.


@dataclass(frozen=True, slots=True)
class Restart:
    """A verdict: restart after ``delay_s``."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A verdict: the process keeps dying; ``reason`` says how often."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A verdict: the process refused to start, and would refuse again."""


Verdict = Restart | GiveUp | Refused


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff over the deaths of the last ``window_s``; one more than ``max_restarts`` is too many.

    Deaths older than the window are forgotten, so a process that ran well for a while starts from the
    shortest delay again.
    """

    initial_delay_s: float = 0.25
    factor: float = 2.0
    max_delay_s: float = 10.0
    window_s: float = 120.0
    max_restarts: int = 8
    is_refusal_final: bool = True
    """Whether a process that refuses to start would refuse again. One that has run with the same settings may lack
    something that comes back, such as room in /dev/shm."""

    def recent(self, deaths: tuple[float, ...], now: float) -> tuple[float, ...]:
        """Return the times in ``deaths`` (seconds, any clock) that still count at ``now``."""
        return tuple(death for death in deaths if now - death < self.window_s)

    def judge(
        self, deaths: tuple[float, ...], now: float, exit_code: int, refusal_code: int | None = EXIT_REFUSED
    ) -> Verdict:
        """Return what to do about a death at ``now`` after the earlier ``deaths``.

        ``exit_code`` is negative for a signal. ``refusal_code`` is None for programs without that convention.
        """
        if self.is_refusal_final and refusal_code is not None and exit_code == refusal_code:
            return Refused()
        before = len(self.recent(deaths, now))
        if before >= self.max_restarts:
            return GiveUp(f"it ended {before + 1} times within {self.window_s:.0f} s")
        return Restart(min(self.initial_delay_s * self.factor**before, self.max_delay_s))
