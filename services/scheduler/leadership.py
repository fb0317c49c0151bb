"""The lead of a cell, with which one scheduler publishes: a record of the broker, replaced by compare-and-set.

Theory of operation. The holder writes the record again several times within its duration. No two clocks are ever
compared:

* The holder counts from the moment at which it *began* the last write that was acknowledged, and speaks for less
  than the duration: what is left of it allows for clocks that run at different speeds.
* An observer counts from the moment at which it *saw* a revision, which is later. When that revision is still the
  newest after the whole duration, it writes its own record on top of exactly that revision. If the holder wrote
  meanwhile, this fails.

So before a successor's write can succeed, the holder's time is over by the holder's own clock. A holder whose time is
over falls silent, and speaks again when a write of its own succeeds, for then no other's did. A write whose answer was
lost is found out by reading the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.scheduler.output_chain import Mark
from shared import logs
from shared.bus.protocol import Bus
from shared.errors import TransportError, Unavailable
from shared.undecodable import UNDECODABLE

LEAD_RECORD = "scheduler"

RENEWALS = 4
"""Writes of the record by its holder within the duration."""

LOOKS = 10
"""Reads of the record by an observer within the duration."""

NEVER_MS = 100 * 365 * 86_400_000
"""What a scheduler of 0.1 reads as the lead's duration."""

MARGIN = 0.2
"""Share of the duration, at its end, in which the holder is silent; clocks may differ in speed by this much."""

_log = logs.get_logger("lead")


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """A point of the stream: every output of inputs up to ``seq`` is at the broker.

    ``time_ns`` is at least that input's timestamp. It tells a stream from one made anew, which counts from 1 again.
    """

    seq: int = 0
    time_ns: int = 0

    def covers(self, cause: int, time_ns: int) -> bool:
        """Return whether the outputs of input ``cause``, stamped ``time_ns``, are known to be at the broker."""
        return cause <= self.seq and time_ns <= self.time_ns


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """How the end of the stream was folded, for a successor without a snapshot of it.

    ``release`` folded the inputs behind ``folded_from``, and may have published what followed from them: from all, or
    from those up to ``said_to`` where its last holder released the lead in good order.
    """

    release: str
    folded_from: int
    said_to: int | None = None
    published: Progress = Progress()
    epoch: int = 0
    policies: tuple[str, ...] = ()  # As in the claim.

    def may_be_continued(self, seq: int, release: str) -> bool:
        """Return whether ``release`` may go on behind input ``seq`` without contradicting what was published."""
        if self.said_to is not None and self.said_to <= seq:
            return True
        return self.release == release and self.folded_from <= seq


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A record's content. ``holder`` is an incarnation, which may have released the lead."""

    holder: str  # "" in a record of 0.1 whose holder released the lead.
    scheduler_id: str
    epoch: int  # Of the holder's term; never goes down.
    lead_ms: int = 0  # How long a write holds the lead; 0 only in records of 0.1.
    duration_ms: int = NEVER_MS  # The same, as 0.1 wrote and reads it.
    is_let_go: bool = False
    release: str  # Of the holder's fold, see fold_release.
    folded_from: int | None = None  # ``release`` folds since this input; None until the holder knows.
    published: Progress = Progress()
    said_to: int | None = None  # Set on release: no output of an input behind this one was published.
    said: Mark = Mark()  # Digest of the outputs of the holder's fold, behind the last input that it has folded.
    policies: tuple[str, ...] = ()  # From outside that the holder's settings name, see ``outside.of_config``.
    before: Tail | None = None  # While ``folded_from`` is None: how the last holder that had a state left the stream.

    @property
    def is_held(self) -> bool:
        """Whether the holder has not released the lead; its time may be over."""
        return bool(self.holder) and not self.is_let_go

    @property
    def held_ms(self) -> int:
        """How long the record holds the lead."""
        return self.lead_ms or self.duration_ms

    @property
    def tail(self) -> Tail | None:
        """How the holder leaves the stream to its successor; None where no holder has published anything yet."""
        if self.folded_from is None and not self.lead_ms:
            # A holder of 0.1 published before it knew, and its record has no room for what its predecessors left.
            return Tail(self.release, 0, published=self.published, epoch=self.epoch)
        if self.folded_from is None:
            return self.before
        return Tail(self.release, self.folded_from, self.said_to, self.published, self.epoch, self.policies)


@dataclass(frozen=True, slots=True)
class _Seen:
    revision: int
    claim: Claim | None
    at_ns: int


class Leadership:
    """One process's view of the lead's record, and its writes to it."""

    def __init__(self, bus: Bus, incarnation: str, duration_ms: int, monotonic_ns: Callable[[], int]) -> None:
        """Begin before the first look at the record.

        ``duration_ms`` sets the pace of looks and renewals, and the timeout of each; how long a write holds the lead is
        in its claim.
        """
        self._bus = bus
        self._incarnation = incarnation
        self._duration_ms = duration_ms
        self._monotonic_ns = monotonic_ns
        self._seen: _Seen | None = None
        self.highest_epoch = 0  # Of all claims seen or written: it outlives a broker that loses its store.
        self._is_ours = False
        self._held_until_ns = 0
        self._is_made_anew = False
        self._renewing = asyncio.Lock()
        self._is_news = asyncio.Event()  # Set by every claim that was not seen before.

    @property
    def is_held(self) -> bool:
        """Whether this process has the lead at this moment; check again before each act."""
        return self._is_ours and self._monotonic_ns() < self._held_until_ns

    @property
    def may_speak(self) -> bool:
        """Whether outputs may be published now: the next holder can read since when this release folds."""
        claim = self.claim
        return self.is_held and claim is not None and claim.folded_from is not None

    @property
    def is_ours(self) -> bool:
        """Whether this process took the lead and knows of no other that has; its time may be over."""
        return self._is_ours

    @property
    def claim(self) -> Claim | None:
        """The claim in the newest record that was seen; None where there is none."""
        return self._seen.claim if self._seen is not None else None

    @property
    def renewal_s(self) -> float:
        """Time between the holder's writes."""
        return self._duration_ms / 1000 / RENEWALS

    @property
    def look_s(self) -> float:
        """Time between an observer's reads."""
        return self._duration_ms / 1000 / LOOKS

    async def look(self) -> None:
        """Read the record. Raises Unavailable or TransportError."""
        record = await self._bus.read_record(LEAD_RECORD, timeout_s=self._timeout_s())
        revision = record.revision if record is not None else 0
        if self._seen is None or self._seen.revision != revision:
            claim = _decode(record.data) if record is not None else None
            # Revisions go up as long as the broker has its store.
            self._is_made_anew = self._is_made_anew or (self._seen is not None and revision < self._seen.revision)
            self._seen = _Seen(revision, claim, self._monotonic_ns())
            self.highest_epoch = max(self.highest_epoch, claim.epoch if claim is not None else 0)
            self._is_news.set()

    def take_made_anew(self) -> bool:
        """Return whether the record was lost, or made anew after a loss, since the last call: the store is another."""
        was_made_anew, self._is_made_anew = self._is_made_anew, False
        return was_made_anew

    async def news(self, at_most_s: float) -> None:
        """Return when a claim is seen or written that was not before, and after ``at_most_s`` in any case."""
        self._is_news.clear()
        try:
            async with asyncio.timeout(at_most_s):
                await self._is_news.wait()
        except TimeoutError:
            pass

    def excuse(self) -> None:
        """Restart the holder's duration now: it could not be heard until now."""
        if self._seen is not None:
            self._seen = _Seen(self._seen.revision, self._seen.claim, self._monotonic_ns())

    @property
    def is_free(self) -> bool:
        """Whether this process may try to take the lead: no process has it, or its holder's time is over."""
        if self._seen is None:
            return False
        claim = self._seen.claim
        if claim is None or not claim.is_held or claim.holder == self._incarnation:
            return True
        return self._monotonic_ns() - self._seen.at_ns >= claim.held_ms * 1_000_000

    async def take(self, claim: Claim) -> bool:
        """Write ``claim`` on top of the record that was judged free; return False when another process was faster."""
        assert self._seen is not None
        return await self._write(claim, self._seen.revision)

    async def renew(self, claim: Claim) -> bool:
        """Hold the lead for another duration from now on; return False when it is another process's.

        Raises Unavailable or TransportError when that is not known; then call again.
        """
        async with self._renewing:
            return await self._renew(claim)

    async def _renew(self, claim: Claim) -> bool:
        assert self._seen is not None
        if await self._write(claim, self._seen.revision):
            return True
        # Either an earlier write of ours arrived after all, or another process took it.
        await self.look()
        known = self.claim
        # Without a record the store is another: a term of the same epoch would number its outputs from 1 again.
        if self._seen.revision and (known is None or known.holder == self._incarnation):
            if await self._write(claim, self._seen.revision):
                return True
            raise Unavailable("the lead's record is being written")
        self.lose()
        return False

    async def let_go(self, claim: Claim, said_to: int | None) -> None:
        """Release the lead, so that the next holder may take it at once; a failure only costs it the duration.

        Call :meth:`lose` before the claim is made, so that nothing is published that it does not cover.
        """
        data = msgspec.json.encode(msgspec.structs.replace(claim, is_let_go=True, said_to=said_to))
        try:
            for _ in range(2):
                assert self._seen is not None
                written = await self._bus.write_record(
                    LEAD_RECORD, data, revision=self._seen.revision, timeout_s=self._timeout_s()
                )
                if written is not None:
                    return
                # A write of ours that was cut off arrived all the same, or the lead is another process's already.
                await self.look()
                if self.claim is None or self.claim.holder != self._incarnation:
                    return
        except (Unavailable, TransportError) as error:
            _log.warning("lead_not_released", reason=error.message)

    def lose(self) -> None:
        """Be silent from now on, whatever the record says."""
        self._is_ours = False

    async def _write(self, claim: Claim, revision: int) -> bool:
        begun_ns = self._monotonic_ns()
        written = await self._bus.write_record(
            LEAD_RECORD, msgspec.json.encode(claim), revision=revision, timeout_s=self._timeout_s()
        )
        if written is None:
            return False
        self._seen = _Seen(written, claim, begun_ns)
        self.highest_epoch = max(self.highest_epoch, claim.epoch)
        self._held_until_ns = begun_ns + int(claim.held_ms * 1_000_000 * (1 - MARGIN))
        self._is_ours = True
        self._is_news.set()
        return True

    def _timeout_s(self) -> float:
        return self._duration_ms / 1000


async def read_tail(bus: Bus) -> Tail | None:
    """Return how the newest record says that the stream was folded; None where there is none. Raises Unavailable."""
    record = await bus.read_record(LEAD_RECORD)
    claim = _decode(record.data) if record is not None else None
    return claim.tail if claim is not None else None


def _decode(data: bytes) -> Claim | None:
    """Return the claim, or None for what no scheduler wrote; such a record may be replaced."""
    try:
        return msgspec.json.decode(data, type=Claim)
    except UNDECODABLE as error:
        _log.error("lead_unreadable", reason=str(error))
        return None
