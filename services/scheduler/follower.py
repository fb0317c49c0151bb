"""The fold over the stream, in whichever role: restored from a snapshot, then following as inputs come.

The active scheduler and its standbys run the same follower. What they fold and what they say is the same; only
the outbox knows who may say it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.scheduler import cell_metrics
from services.scheduler.fold import Fold, Folded, SkipMissed, StepFailed
from services.scheduler.leadership import Claim, Leadership
from services.scheduler.outbox import Outbox
from services.scheduler.quarantine import decide, note_failure
from services.scheduler.restore import YIELD_EVERY, Restored, restore
from shared import logs, subjects
from shared.bus.protocol import Bus, StreamMessage
from shared.errors import TransportError, Unavailable

RETRY_S = 0.25

FAILED_RETRY_S = 1.0
"""A standby folds an input again after so long for which the core raised: a restoration a second is no burden."""

_log = logs.get_logger("follower")

Observer = Callable[[StreamMessage, Folded], None]
"""Told of every input behind the restored ones, once its outputs are in the outbox."""


class Follower:
    """Keeps the state. ``folding`` is held between an input and its outputs, and by whoever looks at the state."""

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        lease: Leadership,
        release: str,
        observe: Observer,
        *,
        check_invariants_every: int = 0,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.folding = asyncio.Lock()
        self.is_sound = True  # False once a step failed: the state may be half changed.
        self._bus = bus
        self._outbox = outbox
        self._lease = lease
        self._release = release
        self._observe = observe
        self._check_every = check_invariants_every
        self._wall_clock_ns = wall_clock_ns
        self._monotonic_ns = monotonic_ns
        self._restored: Restored | None = None
        self._waits_because = ""
        self._again = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def restored(self) -> Restored | None:
        """How the state came to be; None while there is none."""
        return self._restored

    @property
    def fold(self) -> Fold:
        """The state, which must be there."""
        assert self._restored is not None
        return self._restored.fold

    @property
    def position(self) -> int:
        """The last input folded; 0 without a state."""
        return self._restored.fold.position if self._restored is not None else 0

    def suits(self, claim: Claim) -> bool:
        """Whether our state is that of a scheduler with this claim at the same input."""
        if self._restored is None or self._restored.is_lost or claim.release != self._release:
            return False
        return claim.folded_from is None or self._restored.start >= claim.folded_from

    async def run(self) -> None:
        """Restore and follow for ever; begins anew when told to, and when a standby was left behind."""
        while True:
            self._again.clear()
            following = asyncio.create_task(self._restore_and_follow(), name="follow")
            again = asyncio.create_task(self._again.wait(), name="again")
            try:
                await asyncio.wait({following, again}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            except (TransportError, SkipMissed) as error:
                if self._lease.is_ours and self._restored is not None:
                    raise  # An active scheduler whose fold is not the stream's must not go on; the next start restores.
                _log.warning("left_behind", position=self.position, reason=error.message)
                await asyncio.sleep(RETRY_S)
            except StepFailed as failure:
                cell_metrics.STEP_FAILURES.inc()
                _log.error("step_failed", seq=failure.seq, reason=failure.message)
                if self._lease.is_ours and not await self._gets_past(failure):
                    raise  # The next process tries again.
                self._drop()
                if not self._lease.is_ours:
                    await asyncio.sleep(FAILED_RETRY_S)
            finally:
                following.cancel()
                again.cancel()
                await asyncio.wait({following, again})
            # Not at the end of all: the last snapshot is taken of what is there then.
            self._drop()

    def begin_anew(self) -> None:
        """Give the state up and restore it again: the active scheduler's is another."""
        self._drop()
        self._again.set()

    async def reached(self, seq: int) -> None:
        """Wait until input ``seq`` is folded."""
        while self._restored is None or self._restored.fold.position < seq:
            await self.moved()

    async def moved(self) -> None:
        """Wait until another input is folded."""
        self._moved.clear()
        await self._moved.wait()

    def _drop(self) -> None:
        self._restored = None
        self.is_sound = True
        self._outbox.clear()

    async def _gets_past(self, failure: StepFailed) -> bool:
        """Count a failure of the active scheduler; whether that was the last one needed, and it may restore and go on.

        One that was speaking already must end, so that another gets the lease.
        """
        assert self._lease.claim is not None
        await note_failure(self._bus, failure, self._lease.claim)
        if not self.is_sound or not self._lease.is_held:
            return False
        try:
            return failure.seq in (await decide(self._bus, self._outbox.published)).decided
        except (Unavailable, TransportError) as error:
            _log.warning("not_decided", seq=failure.seq, reason=error.message)
            return False

    async def _restore_and_follow(self) -> None:
        self._restored = restored = await self._restore()
        self._moved.set()
        fold = restored.fold
        async for message in self._bus.follow(subjects.INPUTS_STREAM, from_seq=fold.position + 1):
            async with self.folding:
                folded = self._step(fold, message)
                await self._outbox.send(folded.published, message.seq, message.time_ns)
            self._observe(message, folded)
            self._moved.set()
            if message.seq % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _restore(self) -> Restored:
        """A state to go on from: any for the active scheduler, the active one's for a standby. Waits until there is."""
        while True:
            try:
                restored = await self._try_to_restore()
            except Unavailable as error:
                _log.warning("not_restored", reason=error.message)
                restored = None
            if restored is not None:
                return restored
            self._outbox.clear()
            await asyncio.sleep(RETRY_S)

    async def _try_to_restore(self) -> Restored | None:
        if self._lease.is_ours:
            if self._lease.is_held:
                await decide(self._bus, self._outbox.published)
            return await restore(self._bus, self._outbox, check_invariants_every=self._check_every)
        claim = self._lease.claim
        if claim is None or not claim.holder or claim.folded_from is None:
            return None  # There is nobody active, or its state is not there yet.
        if claim.release != self._release:
            self._note_waiting("the active scheduler is of another release")
            return None
        # Should the lease become ours meanwhile, what comes of this is as good.
        restored = await restore(
            self._bus, self._outbox, folded_from=claim.folded_from, check_invariants_every=self._check_every
        )
        self._note_waiting("no snapshot and no stream go back far enough" if restored is None else "")
        return restored

    def _note_waiting(self, reason: str) -> None:
        """Say once why there is no state to stand by with."""
        if reason and reason != self._waits_because:
            _log.warning("cannot_stand_by_yet", reason=reason)
        self._waits_because = reason

    def _step(self, fold: Fold, message: StreamMessage) -> Folded:
        begun_ns = self._monotonic_ns()
        try:
            folded = fold.apply(message)
        except StepFailed:
            self.is_sound = False
            self._restored = None  # Nobody may take for a state what the step left of it.
            raise
        cell_metrics.STEP_SECONDS.observe((self._monotonic_ns() - begun_ns) / 1e9)
        cell_metrics.INPUT_AGE_SECONDS.observe(max(0, self._wall_clock_ns() - message.time_ns) / 1e9)
        cell_metrics.INPUTS.inc()
        if self._lease.is_held:  # A standby's are published by somebody else.
            cell_metrics.OUTPUTS.inc(len(folded.published))
        if folded.input is None:
            cell_metrics.SKIPPED.inc()
            _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
        return folded
