"""Claims of this scheduler: what it writes into the lead's record."""

from __future__ import annotations

from services.scheduler.config import SchedulerConfig
from services.scheduler.follower import Follower
from services.scheduler.leadership import Claim, Tail
from services.scheduler.outbox import Outbox
from services.scheduler.outside import of_config


class Claimant:
    """Makes claims from the state of the fold and of the outbox, which it only reads, and remembers the last one."""

    def __init__(
        self, config: SchedulerConfig, incarnation: str, release: str, follower: Follower, outbox: Outbox
    ) -> None:
        """Claim for the process ``incarnation``; ``release`` is the digest of its code (``fold_release``)."""
        self._config = config
        self._incarnation = incarnation
        self._release = release
        self._policies = of_config(config.cell_config())
        self._follower = follower
        self._outbox = outbox
        self._before: Tail | None = None

    def succeed(self, before: Claim | None) -> int:
        """Return the least epoch that a term may have which succeeds the claim ``before`` (None: there is none)."""
        self._before = before.tail if before is not None else None
        restored = self._follower.restored
        known = max(restored.highest_epoch, restored.fold.state.epoch) if restored is not None else 0
        return max(before.epoch if before is not None else 0, known) + 1

    def claim(self, epoch: int, pause_ms: int = 0) -> Claim:
        """Return this scheduler's claim as the holder; ``pause_ms`` is added to the lead's duration."""
        folded_from = self._folded_from()
        claim = Claim(
            holder=self._incarnation,
            scheduler_id=self._config.id,
            epoch=epoch,
            lead_ms=self._config.lead_ms + pause_ms,
            release=self._release,
            folded_from=folded_from,
            published=self._outbox.published,
            before=self._before if folded_from is None else None,
            said=self._outbox.chain.latest,
            policies=self._policies,
        )
        # Should the state be given up within the term, the next claim still tells what was published from it.
        self._before = claim.tail
        return claim

    def _folded_from(self) -> int | None:
        """Return the input since which this release folds: before our term, where the last holder's was the same."""
        start = self._follower.start
        if start is None:
            return None
        before = self._before
        if before is None or before.release != self._release or start.is_lost:
            return start.seq
        return min(before.folded_from, start.seq)
