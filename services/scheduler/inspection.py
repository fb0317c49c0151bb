"""Calls that read the state and change nothing: what is cached, how requests were admitted, which members joined."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.scheduler import core
from shared import subjects
from shared.bus.protocol import CallHandler
from shared.codec import decode, encode
from shared.messages.explanations import GetAdmissions, GetDivergences
from shared.messages.status import GetRequestStanding, GetStanding, ListCache, RequestStanding, Standing

END_S = 0.25
"""Longest wait of a call for the fold to see the end of a request that its caller knows has ended."""
AT_ONCE = 16
"""Calls on one subject that are answered concurrently."""


class Inspection:
    """Answers calls between steps of the fold."""

    def __init__(
        self, folding: asyncio.Lock, state: Callable[[], core.CellState], moved: Callable[[], Awaitable[None]]
    ) -> None:
        """Answer from what ``state`` returns while ``folding`` is held.

        ``state`` raises Unavailable when this scheduler may not answer. ``moved`` returns when the state may have
        changed.
        """
        self._folding = folding
        self._state = state
        self._moved = moved

    def handlers(self) -> list[tuple[str, CallHandler]]:
        """Return (subject, handler) of each call to serve."""
        return [
            (subjects.rpc("scheduler", "cache"), self._listing),
            (subjects.rpc("scheduler", "standing"), self._standing),
            (subjects.rpc("scheduler", "admissions"), self._admissions),
            (subjects.rpc("scheduler", "divergences"), self._divergences),
            (subjects.rpc("scheduler", "request"), self._request),
        ]

    async def _listing(self, data: bytes) -> bytes:
        call = decode(data, ListCache)
        async with self._folding:
            return encode(core.list_cache(self._state(), call))

    async def _admissions(self, data: bytes) -> bytes:
        call = decode(data, GetAdmissions)
        try:
            async with asyncio.timeout(END_S):
                while any(name in self._state().requests for name in call.ended):
                    await self._moved()
        except TimeoutError:
            pass  # The answer is what is known by now.
        async with self._folding:
            return encode(core.find_admissions(self._state(), call))

    async def _divergences(self, data: bytes) -> bytes:
        call = decode(data, GetDivergences)
        async with self._folding:
            return encode(core.find_divergences(self._state(), call))

    async def _standing(self, data: bytes) -> bytes:
        call = decode(data, GetStanding)
        async with self._folding:
            storage = self._state().storages.get(call.storage_id)
        return encode(Standing(is_member=storage is not None and storage.incarnation == call.incarnation))

    async def _request(self, data: bytes) -> bytes:
        call = decode(data, GetRequestStanding)
        async with self._folding:
            return encode(RequestStanding(is_known=call.request_id in self._state().requests))
