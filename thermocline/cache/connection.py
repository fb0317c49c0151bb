"""A connection to the cell's broker for as long as a verb runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.gateway.cache_calls import CacheCalls
from shared.bus.nats_bus import connect

CONNECT_S = 10.0


@asynccontextmanager
async def cell(urls: Sequence[str]) -> AsyncIterator[CacheCalls]:
    """The calls that a verb makes. Raises Unavailable when no broker answers in time."""
    bus = await connect(urls, "cache", timeout_s=CONNECT_S)
    try:
        yield CacheCalls(bus)
    finally:
        await bus.close()
