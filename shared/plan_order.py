"""Executing numbered plans in order, each once. Pure; workers and storages use it alike.

A target receives its plans over core NATS, where one may be lost or, after a scheduler's restart, come twice.
:class:`PlanOrder` hands out plans of its own incarnation in order of number, drops repeats, holds what came
too early, and names the missing numbers, so that its shell can fetch them from ``TC_OUTPUTS``::

    due = order.offer(plan)        # execute these now, in this order
    if order.missing is not None:  # read the stream and offer what it has
        ...

Fencing: a plan whose epoch is lower than that of the last plan handed out was sent by a scheduler that has
been superseded, so it is dropped; so is any plan of another incarnation of this target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """The fields of an envelope (``WorkerPlan``, ``StoragePlan``) that the order reads."""

    @property
    def incarnation(self) -> str:
        """Incarnation of the target that the plan is for."""

    @property
    def number(self) -> int:
        """Place of the plan among its incarnation's, from 1."""

    @property
    def epoch(self) -> int:
        """Fencing epoch of the scheduler that sent the plan."""


P = TypeVar("P", bound=Numbered)


@dataclass(slots=True)
class OrderCounts:
    """Numbers of plans that were not handed out at once, by reason."""

    repeated: int = 0
    foreign: int = 0  # Plans of another incarnation.
    fenced: int = 0
    held: int = 0  # Came before one with a lower number.
    overflowed: int = 0  # Dropped because too many were held; the stream still has them.


class PlanOrder(Generic[P]):
    """The plans of one incarnation. ``last`` is the number of the last plan handed out, 0 before the first."""

    def __init__(self, incarnation: str, *, capacity: int = 4096) -> None:
        """Begin before the first plan; at most ``capacity`` plans that come too early are held.

        Raises ValueError for a capacity below 1.
        """
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.incarnation = incarnation
        self._capacity = capacity
        self._held: dict[int, P] = {}
        self._epoch = 0
        self.last = 0
        self.counts = OrderCounts()

    def offer(self, plan: P) -> list[P]:
        """Take a plan from any source; return the plans that are now due, lowest number first."""
        if plan.incarnation != self.incarnation:
            self.counts.foreign += 1
            return []
        if plan.number <= self.last:
            self.counts.repeated += 1
            return []
        if plan.epoch < self._epoch:
            self.counts.fenced += 1
            return []
        rival = self._held.get(plan.number)
        if rival is not None:
            self.counts.repeated += 1
            if rival.epoch >= plan.epoch:
                return []
        self._held[plan.number] = plan
        due = self._take_due()
        if not due:
            self.counts.held += 1
            self._shed()
        return due

    @property
    def missing(self) -> range | None:
        """Numbers that must come before the lowest held plan; None when none is held."""
        if not self._held:
            return None
        return range(self.last + 1, min(self._held))

    def _take_due(self) -> list[P]:
        due: list[P] = []
        while (plan := self._held.pop(self.last + 1, None)) is not None:
            if plan.epoch < self._epoch:
                # Held before a plan of a newer epoch was handed out: the newer scheduler sends that number again.
                self.counts.fenced += 1
                break
            self.last, self._epoch = plan.number, plan.epoch
            due.append(plan)
        return due

    def _shed(self) -> None:
        while len(self._held) > self._capacity:
            # The highest is needed last, and the stream keeps it.
            del self._held[max(self._held)]
            self.counts.overflowed += 1
