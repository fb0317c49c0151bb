"""A connection to the cell's broker for as long as a verb runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.cache_calls import CacheCalls
from shared.broker import BrokerSettings
from shared.bus.nats_bus import connect_with

CONNECT_S = 10.0


@asynccontextmanager
async def cell(broker: BrokerSettings) -> AsyncIterator[CacheCalls]:
    """The calls that a verb makes. Raises Unavailable when no broker answers in time, ConfigError when all refuse."""
    bus = await connect_with(broker, "cache", timeout_s=CONNECT_S)
    try:
        yield CacheCalls(bus)
    finally:
        await bus.close()
