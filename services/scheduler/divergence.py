"""Comparison of a standby's outputs with the active scheduler's. Pure but for its log: the time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.scheduler import cell_metrics
from services.scheduler.leadership import Claim
from services.scheduler.output_chain import Mark, OutputChain
from shared import logs
from shared.messages.status import Degradation

CALM_NS = 5 * 10**9
"""After a difference, nothing is compared for this long. Should the active one's fold be the bad one, every restoration
from its older snapshots ends in the next difference; more than one in that time would tell nothing new."""

TOLD_NS = 600 * 10**9
"""How long this scheduler's heartbeats report a difference: its machine's memory may be bad."""

_log = logs.get_logger("divergence")


class Divergence:
    """Compares one claim at a time, once the standby has folded the input that the claim names."""

    def __init__(self, scheduler_id: str, monotonic_ns: Callable[[], int]) -> None:
        """Begin without a difference; ``scheduler_id`` is named in the heartbeats that report one."""
        self._scheduler_id = scheduler_id
        self._monotonic_ns = monotonic_ns
        self._due: Mark | None = None
        self._seq = 0  # Of the last difference.
        self._found_ns = 0

    def is_found(self, chain: OutputChain, claim: Claim) -> bool:
        """Take in the active scheduler's claim; return whether the folds are now known to differ."""
        if self._seq and self._monotonic_ns() - self._found_ns < CALM_NS:
            return False
        if self._due is None and claim.said.seq:  # Schedulers of 0.1 say nothing.
            self._due = claim.said
        due = self._due
        if due is None or not chain.has_passed(due.seq):
            return False
        self._due = None
        own = chain.digest_at(due.seq)
        if own is None or own == due.digest:
            return False
        self._seq, self._found_ns = due.seq, self._monotonic_ns()
        cell_metrics.DIVERGED.inc()
        _log.error("fold_differs", seq=due.seq, active=claim.scheduler_id, consequence="restored from a snapshot")
        return True

    def degraded(self) -> Iterator[Degradation]:
        """Yield the last difference, for ten minutes, to be announced with this scheduler's heartbeats."""
        if self._seq and self._monotonic_ns() - self._found_ns < TOLD_NS:
            reason = (
                f"up to input {self._seq} this standby's decisions were not those of the active scheduler; it has "
                "restored its state. If it happens again, a machine's memory is bad"
            )
            yield Degradation(component=self._scheduler_id, what="fold", reason=reason)
