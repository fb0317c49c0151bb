"""The parts of sharing between nodes, joined: an engine, one's own pool for others, and others' pools for oneself."""

from __future__ import annotations

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
"""Memory for chunks on their way from other nodes; more than a network's round trips need would only be registered."""

FLAG = "--share"

_log = logs.get_logger("storage")


def is_installed() -> bool:
    """Whether the library that ``--share nixl`` needs is there. Does not import it."""
    return any(importlib.util.find_spec(module.partition(".")[0]) is not None for module in MODULES)


class Sharing:
    """Of one incarnation of a storage. Without an engine, ``pool`` and ``lenders`` are None and a fault says why."""

    def __init__(self, config: StorageConfig, bus: Bus, pools: Pools, threads: IoThreads, incarnation: str) -> None:
        """Start sharing. Raises ConfigError where the library is not installed."""
        self.pool: SharedPool | None = None
        self.lenders: Lenders | None = None
        self.engine_name = ""
        """For ``StorageJoined``; "" while nothing is shared."""
        self._reason = ""
        if config.share == "off":
            return
        try:
            engine: TransferEngine = NixlEngine(f"{config.id}-{incarnation}")
        except TransportError as error:
            self._reason = error.message
            _log.error("sharing_left_out", reason=error.message)
            return
        self.pool = SharedPool(pools, engine, incarnation)
        self.lenders = Lenders(bus, engine, threads, staging_bytes=min(MOST_STAGING, config.staging_bytes))
        self.engine_name = engine.name

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is degraded in sharing: what, why, and the flag."""
        if self._reason:
            yield "sharing", self._reason, FLAG
        if self.lenders is not None:
            yield from self.lenders.faults()
