"""The answers that all gateways of a cell share: a bucket in the broker, read in time or not at all.

A store that fails is not used for a while, and reported as a degradation. Until then, conversations continue from this
gateway's own memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.gateway.turns import measures
from services.gateway.turns.places import Entry
from services.gateway.turns.sealing import seal, unseal
from shared import logs
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.errors import PayloadTooLarge, ThermoclineError, Unavailable

READERS = 8
"""Limit on concurrent lookups; further ones wait within their own time."""

REST_FIRST_S = 1.0
REST_MOST_S = 30.0

_log = logs.get_logger("gateway.turns")


class AnswerStore:
    """Access to the bucket. ``fault`` says why it is not used, "" while it works."""

    def __init__(self, bus: Bus, lookup_s: float, clock: Callable[[], float]) -> None:
        """Begin with the store in use.

        ``lookup_s`` bounds a read together with the wait for its turn; ``clock`` is monotonic, in seconds.
        """
        self.fault = ""
        self._bus = bus
        self._lookup_s = lookup_s
        self._clock = clock
        self._gate = asyncio.Semaphore(READERS)
        self._rest = Backoff(REST_FIRST_S, REST_MOST_S)
        self._closed_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether to use the store now; False for a pause after a failure."""
        return self._clock() >= self._closed_until_s

    async def read(self, entries: Sequence[Entry]) -> dict[str, bytes | None]:
        """Return the ids (packed int32) by entry, None for absent ones. Entries not read in time are left out."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._lookup_s), self._gate:
                left_s = max(0.0, self._lookup_s - (self._clock() - began_s))
                found = await self._bus.read_answers([entry.name for entry in entries], timeout_s=left_s)
        except TimeoutError:
            found = {}
            self._failed(f"nothing came within {self._lookup_s:g} s")
        except ThermoclineError as error:
            found = {}
            self._failed(error.message)
        else:
            self._worked()
        measures.LOOKUP_TIME.observe(self._clock() - began_s)
        measures.LOOKUPS.labels("late").inc(len(entries) - len(found))
        return {entry.name: self._opened(entry, found[entry.name]) for entry in entries if entry.name in found}

    async def write(self, entry: Entry, packed: bytes) -> None:
        """Store the ids of an answer; failures are counted, not raised."""
        if not self.is_open:
            measures.ANSWERS.labels("store_away").inc()
            return
        try:
            await self._bus.write_answer(entry.name, seal(entry, packed))
        except PayloadTooLarge:
            measures.ANSWERS.labels("too_large").inc()
        except ThermoclineError as error:
            measures.ANSWERS.labels("failed").inc()
            if isinstance(error, Unavailable):
                self._failed(error.message)
        else:
            measures.ANSWERS.labels("stored").inc()
            self._worked()

    @staticmethod
    def _opened(entry: Entry, sealed: bytes | None) -> bytes | None:
        packed = unseal(entry, sealed) if sealed is not None else None
        measures.LOOKUPS.labels("found" if packed else "absent" if sealed is None else "unreadable").inc()
        return packed

    def _failed(self, reason: str) -> None:
        self._closed_until_s = self._clock() + self._rest.next_s()
        if not self.fault:
            _log.warning("answers_not_shared", reason=reason)
        self.fault = reason

    def _worked(self) -> None:
        if self.fault:
            _log.info("answers_shared_again")
        self.fault = ""
        self._rest.reset()
