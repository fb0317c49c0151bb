"""Calls that look into the state and change nothing: what is cached, how requests were admitted, who is a member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.scheduler import core
from shared import subjects
from shared.bus.protocol import CallHandler
from shared.codec import decode, encode
from shared.messages.explanations import GetAdmissions
from shared.messages.status import GetRequestStanding, GetStanding, ListCache, RequestStanding, Standing


class Inspection:
    """Answers between steps: ``folding`` is held while the state is looked at.

    ``state`` gives it, or raises Unavailable when this scheduler has no right to answer.
    """

    def __init__(self, folding: asyncio.Lock, state: Callable[[], core.CellState]) -> None:
        self._folding = folding
        self._state = state

    def handlers(self) -> list[tuple[str, CallHandler]]:
        """What to serve, by subject."""
        return [
            (subjects.rpc("scheduler", "cache"), self._listing),
            (subjects.rpc("scheduler", "standing"), self._standing),
            (subjects.rpc("scheduler", "admissions"), self._admissions),
            (subjects.rpc("scheduler", "request"), self._request),
        ]

    async def _listing(self, data: bytes) -> bytes:
        call = decode(data, ListCache)
        async with self._folding:
            return encode(core.list_cache(self._state(), call))

    async def _admissions(self, data: bytes) -> bytes:
        call = decode(data, GetAdmissions)
        async with self._folding:
            return encode(core.find_admissions(self._state(), call))

    async def _standing(self, data: bytes) -> bytes:
        call = decode(data, GetStanding)
        async with self._folding:
            storage = self._state().storages.get(call.storage_id)
        return encode(Standing(is_member=storage is not None and storage.incarnation == call.incarnation))

    async def _request(self, data: bytes) -> bytes:
        call = decode(data, GetRequestStanding)
        async with self._folding:
            return encode(RequestStanding(is_known=call.request_id in self._state().requests))
