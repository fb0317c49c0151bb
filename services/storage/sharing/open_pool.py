"""The host pool of this storage, opened to other storages: registered once, when the first of them asks."""

from __future__ import annotations

import asyncio

from services.storage.pools import Pools
from services.storage.sharing.engine import TransferEngine
from shared import logs
from shared.codec import decode, encode
from shared.errors import InvalidRequest
from shared.messages.sharing import OpenedPool, OpenPool

_log = logs.get_logger("storage")


class SharedPool:
    """Answers ``OpenPool``. Owned by the event loop."""

    def __init__(self, pools: Pools, engine: TransferEngine, incarnation: str) -> None:
        """Answer for this ``incarnation`` alone; the host pool is registered with ``engine`` at the first call.

        ``pools`` and ``engine`` are closed by their owners.
        """
        self._pools = pools
        self._engine = engine
        self._incarnation = incarnation
        self._opening = asyncio.Lock()
        self._opened: bytes | None = None

    async def answer(self, data: bytes) -> bytes:
        """Return where the pool is. Registering much memory takes a while, which the first caller waits for.

        Raises InvalidRequest for a caller that cannot read it, TransportError where it cannot be registered; both
        travel back.
        """
        call = decode(data, OpenPool)
        if call.incarnation != self._incarnation:
            raise InvalidRequest("this incarnation has ended")
        if call.engine != self._engine.name:
            raise InvalidRequest(f"this storage shares by {self._engine.name}, not by {call.engine}")
        async with self._opening:
            if self._opened is None:
                self._opened = await asyncio.to_thread(self._open)
        return self._opened

    def _open(self) -> bytes:
        host = self._pools.host
        self._engine.register(host.segment_bytes())
        opened = OpenedPool(
            incarnation=self._incarnation,
            metadata=self._engine.metadata(),
            address=host.segment_bytes().ctypes.data,
            handle=host.handle,
        )
        _log.info("pool_shared", engine=self._engine.name, nbytes=host.handle.nbytes)
        return encode(opened)
