"""The answers that all gateways of a cell know: a bucket of the broker's, read in time or not at all.

A store that fails is left alone for a while, and told as a degradation. Conversations then go on from what this gateway
knows by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.gateway.turns import measures
from services.gateway.turns.places import Place
from services.gateway.turns.sealing import seal, unseal
from shared import logs
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.errors import PayloadTooLarge, ThermoclineError, Unavailable

READERS = 8
"""Requests that look up answers at once; further ones wait within their own time."""

REST_FIRST_S = 1.0
REST_MOST_S = 30.0

_log = logs.get_logger("gateway.turns")


class AnswerStore:
    """``fault`` is why it was left alone, "" while it works."""

    def __init__(self, bus: Bus, lookup_s: float, clock: Callable[[], float]) -> None:
        self.fault = ""
        self._bus = bus
        self._lookup_s = lookup_s
        self._clock = clock
        self._gate = asyncio.Semaphore(READERS)
        self._rest = Backoff(REST_FIRST_S, REST_MOST_S)
        self._closed_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it is worth asking now."""
        return self._clock() >= self._closed_until_s

    async def read(self, places: Sequence[Place]) -> dict[str, list[bytes]]:
        """Answers by place, none where none are stored. A place of which nothing came in time is left out."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._lookup_s), self._gate:
                left_s = max(0.0, self._lookup_s - (self._clock() - began_s))
                entries = await self._bus.read_answers([place.name for place in places], timeout_s=left_s)
        except TimeoutError:
            entries = {}
            self._failed(f"nothing came within {self._lookup_s:g} s")
        except ThermoclineError as error:
            entries = {}
            self._failed(error.message)
        else:
            self._worked()
        measures.LOOKUP_TIME.observe(self._clock() - began_s)
        measures.LOOKUPS.labels("late").inc(len(places) - len(entries))
        return {place.name: self._opened(place, entries[place.name]) for place in places if place.name in entries}

    async def write(self, place: Place, answers: Sequence[bytes]) -> None:
        """Store what was said at a place; what fails is counted."""
        if not self.is_open:
            measures.ANSWERS.labels("store_away").inc()
            return
        try:
            await self._bus.write_answer(place.name, seal(place, answers))
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
    def _opened(place: Place, entry: bytes | None) -> list[bytes]:
        answers = unseal(place, entry) if entry is not None else []
        measures.LOOKUPS.labels("unreadable" if answers is None else "found" if answers else "absent").inc()
        return answers or []

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
