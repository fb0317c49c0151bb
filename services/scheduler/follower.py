"""The fold over the stream, in either role: restored from a snapshot, then following inputs as they come.

The active scheduler and its standbys run the same follower. Their folds and outputs are the same; only the outbox knows
which of them may publish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.scheduler import cell_metrics
from services.scheduler.fold import Fold, Folded, SkipMissed, StepFailed
from services.scheduler.leadership import Claim, Leadership
from services.scheduler.outbox import Outbox
from services.scheduler.output_chain import Mark
from services.scheduler.outside import missing, unknown_in
from services.scheduler.quarantine import decide, note_failure, read_skips
from services.scheduler.restore import YIELD_EVERY, Start, find_active_start, find_start, fold_tail
from shared import logs, subjects
from shared.bus.protocol import Bus, StreamMessage
from shared.errors import PolicyMissing, TransportError, Unavailable
from shared.messages.cell_events import CellConfigured

RETRY_S = 0.25

FAILED_RETRY_S = 1.0
"""Wait of a standby before it folds again an input for which the core raised: a restoration a second is no burden."""

_log = logs.get_logger("follower")

Observer = Callable[[StreamMessage, Folded], None]
"""Called for every input behind the restored ones, once its outputs are in the outbox."""


class Follower:
    """Keeps the state. ``folding`` is held from an input to its outputs, and by readers of the state."""

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        lead: Leadership,
        release: str,
        observe: Observer,
        *,
        check_invariants_every: int = 0,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin without a state, which :meth:`run` restores.

        ``lead`` and ``outbox`` are this process's own, and ``release`` is the digest of its code. Every
        ``check_invariants_every`` inputs the core is checked; 0 is never. Both clocks serve metrics alone.
        """
        self.folding = asyncio.Lock()
        self.is_sound = True  # False once a step failed: the state may be half changed.
        self._bus = bus
        self._outbox = outbox
        self._lead = lead
        self._release = release
        self._observe = observe
        self._check_every = check_invariants_every
        self._wall_clock_ns = wall_clock_ns
        self._monotonic_ns = monotonic_ns
        self._start: Start | None = None
        self._is_restored = False
        self._is_frozen = False
        self._waits_because = ""
        self._again = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def release(self) -> str:
        """The digest of this process's code, see :mod:`fold_release`: processes with the same digest fold alike."""
        return self._release

    @property
    def start(self) -> Start | None:
        """Where the fold began, also while the tail behind it is being folded; None before that is decided."""
        return self._start

    @property
    def restored(self) -> Start | None:
        """The start of the current state, once the tail is folded; None while there is no state."""
        return self._start if self._is_restored else None

    @property
    def fold(self) -> Fold:
        """The current fold; the state must be restored."""
        assert self._start is not None
        assert self._is_restored
        return self._start.fold

    @property
    def position(self) -> int:
        """Sequence of the last input folded; 0 without a state."""
        return self._start.fold.position if self._start is not None else 0

    def suits(self, claim: Claim) -> bool:
        """Return whether our state equals, at the same input, that of a scheduler with this claim."""
        start = self._start
        if start is None or start.is_lost or claim.release != self._release:
            return False
        return claim.folded_from is None or start.seq >= claim.folded_from

    def freeze(self) -> None:
        """Fold no further input, permanently: a snapshot taken afterwards covers all that was folded here."""
        self._is_frozen = True

    async def run(self) -> None:
        """Restore and follow until cancelled; begin again when told to, and when a standby was left behind.

        Raises what ended the fold where this scheduler is the active one and must not go on.
        """
        while True:
            self._again.clear()
            following = asyncio.create_task(self._restore_and_follow(), name="follow")
            again = asyncio.create_task(self._again.wait(), name="again")
            try:
                await asyncio.wait({following, again}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            except (TransportError, SkipMissed) as error:
                if self._lead.is_ours and self._is_restored:
                    raise  # An active scheduler whose fold is not the stream's must not go on; the next start restores.
                _log.warning("left_behind", position=self.position, reason=error.message)
                await asyncio.sleep(RETRY_S)
            except StepFailed as failure:
                cell_metrics.STEP_FAILURES.inc()
                _log.error("step_failed", seq=failure.seq, reason=failure.message)
                if self._lead.is_ours and not await self._gets_past(failure):
                    raise  # The next process tries again.
                self._drop()
                if not self._lead.is_ours:
                    await asyncio.sleep(FAILED_RETRY_S)
            finally:
                following.cancel()
                again.cancel()
                await asyncio.wait({following, again})
            # Not when cancelled: the last snapshot is taken of the state that is there then.
            self._drop()

    def begin_anew(self) -> None:
        """Drop the state and restore it again, because the active scheduler's differs."""
        self._drop()
        self._again.set()

    async def reached(self, seq: int) -> None:
        """Wait until the state is restored and input ``seq`` is folded."""
        while not self._is_restored or self.position < seq:
            await self.moved()

    async def moved(self) -> None:
        """Wait until the next input is folded, or a state is restored."""
        self._moved.clear()
        await self._moved.wait()

    def _drop(self) -> None:
        self._start, self._is_restored, self.is_sound = None, False, True
        self._outbox.clear()

    async def _gets_past(self, failure: StepFailed) -> bool:
        """Count a failure of the active scheduler; return whether it was the last one needed, so that it may go on.

        A scheduler that was publishing already must end, so that another gets the lead.
        """
        assert self._lead.claim is not None
        await note_failure(self._bus, failure, self._lead.claim)
        if not self.is_sound or not self._lead.is_held:
            return False
        try:
            return failure.seq in (await decide(self._bus, self._outbox.published)).decided
        except (Unavailable, TransportError) as error:
            _log.warning("not_decided", seq=failure.seq, reason=error.message)
            return False

    async def _restore_and_follow(self) -> None:
        fold = (await self._restore()).fold
        self._is_restored = True
        self._moved.set()
        async for message in self._bus.follow(subjects.INPUTS_STREAM, from_seq=fold.position + 1):
            async with self.folding:
                if self._is_frozen:
                    break
                begun_ns = self._monotonic_ns()
                folded = self._step(fold, message)
                step_ns, age_ns = self._monotonic_ns() - begun_ns, self._wall_clock_ns() - message.time_ns
                await self._outbox.send(folded.published, message.seq, message.time_ns)
            if folded.published:
                await asyncio.sleep(0)  # They are written in this turn of the loop, before anything else is done.
            self._measure(message, folded, step_ns, age_ns)
            self._observe(message, folded)
            self._moved.set()
            if message.seq % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        await asyncio.get_running_loop().create_future()  # Frozen: there is nothing to do until this is cancelled.

    async def _restore(self) -> Start:
        """Wait for a state to go on from: any for the active scheduler, the active one's for a standby."""
        while True:
            try:
                start = await self._try_to_restore()
            except Unavailable as error:
                _log.warning("not_restored", reason=error.message)
                start = None
            if start is not None:
                return start
            self._drop()
            # A start begins before the first look at the lead's record: what it shows is acted on at once.
            await self._lead.news(RETRY_S)

    async def _try_to_restore(self) -> Start | None:
        # Set as soon as it is known: the claim must say it before any output that follows from it is published.
        self._start = start = await self._find_start()
        if start is not None:
            self._outbox.clear(Mark(start.seq, start.said))
            await fold_tail(self._bus, self._outbox, start)
        return start

    async def _find_start(self) -> Start | None:
        claim = self._lead.claim
        if self._lead.is_ours:
            assert claim is not None
            if self._lead.is_held:
                await decide(self._bus, self._outbox.published)
            return await find_start(
                self._bus, release=self._release, tail=claim.tail, check_invariants_every=self._check_every
            )
        if claim is None or not claim.is_held or claim.folded_from is None:
            return None  # There is no active scheduler, or its state is not there yet.
        if claim.release != self._release:
            absent = missing(claim.policies)
            if absent:
                fault = PolicyMissing.of("the active scheduler", ", ".join(absent))
                self._note_waiting(fault.message, code=fault.code)
            else:
                other_code = f", or has other code of {', '.join(claim.policies)}" if claim.policies else ""
                self._note_waiting(f"the active scheduler is of another release{other_code}")
            return None
        due = [seq for seq in (await read_skips(self._bus)).due() if seq > claim.published.seq]
        if due:
            # The core may hang in it. The active scheduler decides when it restores, or comes past it.
            self._note_waiting(f"input {due[0]} is to be left out, which is not decided yet")
            return None
        start = await find_active_start(
            self._bus, folded_from=claim.folded_from, check_invariants_every=self._check_every
        )
        self._note_waiting("no snapshot and no stream go back far enough" if start is None else "")
        # Should the lead have become ours meanwhile, this is as good, unless another release had it in between.
        newest = self._lead.claim
        tail = newest.tail if newest is not None else None
        if start is None or tail is None or not tail.may_be_continued(start.seq, self._release):
            return None
        return start

    def _note_waiting(self, reason: str, **told: str) -> None:
        """Log once why this scheduler cannot stand by."""
        if reason and reason != self._waits_because:
            _log.warning("cannot_stand_by_yet", reason=reason, **told)
        self._waits_because = reason

    def _step(self, fold: Fold, message: StreamMessage) -> Folded:
        try:
            return fold.apply(message)
        except StepFailed:
            self.is_sound = self._is_restored = False  # The step may have left the state half changed.
            raise

    def _measure(self, message: StreamMessage, folded: Folded, step_ns: int, age_ns: int) -> None:
        """Count an input that was folded, and log what is wrong with it. Behind its outputs: it decides nothing."""
        cell_metrics.STEP_SECONDS.observe(step_ns / 1e9)
        cell_metrics.INPUT_AGE_SECONDS.observe(max(0, age_ns) / 1e9)
        cell_metrics.INPUTS.inc()
        if self._lead.is_held:  # A standby's are published by the active scheduler.
            cell_metrics.OUTPUTS.inc(len(folded.published))
        if folded.input is None:
            cell_metrics.SKIPPED.inc()
            _log.error("input_skipped", seq=message.seq, subject=message.subject, reason=folded.fault)
        elif isinstance(folded.input, CellConfigured):
            for each in unknown_in(folded.input.config):
                _log.error("setting_not_applied", seq=message.seq, reason=f"{each} is not registered here")
