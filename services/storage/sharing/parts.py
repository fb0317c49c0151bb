"""The parts of sharing between nodes: an engine, this storage's pool for others, and others' pools for this one."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

from services.storage.config import StorageConfig
from services.storage.io_threads import IoThreads
from services.storage.pools import Pools
from services.storage.sharing.engine import TransferEngine
from services.storage.sharing.lenders import Lenders
from services.storage.sharing.nixl_engine import MODULES, NixlEngine
from services.storage.sharing.open_pool import SharedPool
from shared import logs
from shared.bus.protocol import Bus
from shared.errors import TransportError

MOST_STAGING = 64 * 2**20
"""Most memory for chunks in flight from other nodes; more than a network's round trips need has no use."""

FLAG = "--share"

_START_TRIES, _START_PAUSE_S = 3, 0.3
"""Tries of the engine's start, and the pause between them: it can fail on a loaded machine and succeed a moment later.
"""

_log = logs.get_logger("storage")


def is_installed() -> bool:
    """Return whether the library that ``--share nixl`` needs is there. Does not import it."""
    return any(importlib.util.find_spec(module.partition(".")[0]) is not None for module in MODULES)


class Sharing:
    """Sharing by one incarnation of a storage.

    Before :meth:`start`, and without an engine, ``pool`` and ``lenders`` are None; a fault says why there is none.
    """

    def __init__(self, config: StorageConfig, bus: Bus, pools: Pools, threads: IoThreads, incarnation: str) -> None:
        """Prepare; nothing is shared before :meth:`start`, which opens ``pools`` to other storages."""
        self.pool: SharedPool | None = None
        self.lenders: Lenders | None = None
        self.engine_name = ""
        """Name of the engine for ``StorageJoined``; "" while nothing is shared."""
        self._config = config
        self._bus = bus
        self._pools = pools
        self._threads = threads
        self._incarnation = incarnation
        self._reason = ""

    async def start(self) -> None:
        """Start the engine, with a few tries, in a thread. Raises ConfigError where the library is not installed."""
        if self._config.share == "off":
            return
        engine = await self._engine()
        if engine is None:
            return
        staging_bytes = min(MOST_STAGING, self._config.staging_bytes)
        self.pool = SharedPool(self._pools, engine, self._incarnation)
        self.lenders = Lenders(self._bus, engine, self._threads, staging_bytes=staging_bytes)
        self.engine_name = engine.name

    async def _engine(self) -> TransferEngine | None:
        """Return an engine, or None when it did not start; then ``_reason`` says why."""
        name = f"{self._config.id}-{self._incarnation}"
        for tries_left in reversed(range(_START_TRIES)):
            try:
                return await asyncio.to_thread(NixlEngine, name)
            except TransportError as error:
                reason = error.message
            if tries_left:
                _log.warning("sharing_not_started", reason=reason)
                await asyncio.sleep(_START_PAUSE_S)
        self._reason = reason
        _log.error("sharing_left_out", reason=reason)
        return None

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield (what, why, flag) for each degradation of sharing."""
        if self._reason:
            yield "sharing", self._reason, FLAG
        if self.lenders is not None:
            yield from self.lenders.faults()
