"""Answers storages' calls to copy device pages to host pages (``shared.messages.page_stores``).

A storage whose call is not answered does not know whether its host pages are still being written, and gives them to
no request. It asks again, and the answer to that is the answer to the first call, which is carried out once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.worker.kv.host_pools import HostPools
from services.worker.kv.host_stores import HostStores
from shared.codec import decode, encode
from shared.messages.page_stores import PagesStored, StorePages

CALLS_MOST = 32
"""Most calls that wait or run at a time; a storage has as many as it has threads."""

ANSWERS_KEPT = 256
"""Answers remembered for repeated calls; the storage repeats one within seconds."""

_Key = tuple[str, str, int, int]


class StoreCalls:
    """Owned by the event loop."""

    def __init__(self, incarnation: str, pools: HostPools, stores: HostStores) -> None:
        """Answer calls to this ``incarnation``; ``stores`` copies into ``pools``, and neither is closed here."""
        self._incarnation, self._pools, self._stores = incarnation, pools, stores
        self._calls: dict[_Key, asyncio.Future[Any]] = {}  # In order of arrival; each ends with a PagesStored.

    async def answer(self, data: bytes) -> bytes:
        """Handle one call; return the packed answer.

        If this is cancelled there is no answer, and the copy runs to its end.
        """
        call = decode(data, StorePages)
        if call.worker_incarnation != self._incarnation:
            return encode(PagesStored(refused=f"this is incarnation {self._incarnation}"))
        if not call.device_pages and not call.host_pages:
            able: PagesStored = await asyncio.wrap_future(self._stores.begin(self._pools, call))
            return encode(able)
        key = (call.storage_id, call.storage_incarnation, call.transfer_id, call.part)
        if key not in self._calls:
            if sum(not each.done() for each in self._calls.values()) >= CALLS_MOST:
                return encode(PagesStored(refused=f"{CALLS_MOST} calls wait or run already"))
            try:
                self._calls[key] = asyncio.wrap_future(self._stores.begin(self._pools, call))
            except RuntimeError:
                return encode(PagesStored(refused="the worker is stopping"))
            self._forget()
        return encode(await asyncio.shield(self._calls[key]))

    def _forget(self) -> None:
        """Forget the oldest answers beyond ``ANSWERS_KEPT``."""
        ended = [key for key, each in self._calls.items() if each.done()]
        for key in ended[: max(0, len(ended) - ANSWERS_KEPT)]:
            del self._calls[key]
