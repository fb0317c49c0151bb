"""A connection to the cell's broker for as long as a verb runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.cache_calls import CacheCalls
from shared.broker import BrokerSettings
from shared.bus.nats_bus import connect_with
from shared.progress_line import Bar, shown

CONNECT_S = 5.0


@asynccontextmanager
async def calls_of(broker: BrokerSettings) -> AsyncIterator[CacheCalls]:
    """Yield the calls of a cell.

    Raises Unavailable when no broker answers in time, ConfigError when all refuse.
    """
    bus = await connect_with(broker, "cache", timeout_s=CONNECT_S)
    try:
        yield CacheCalls(bus)
    finally:
        await bus.close()


@asynccontextmanager
async def cell(broker: BrokerSettings) -> AsyncIterator[CacheCalls]:
    """As :func:`calls_of`, with progress on stderr for as long as the block runs, which must not print."""
    async with watched(broker) as (calls, _):
        yield calls


@asynccontextmanager
async def watched(broker: BrokerSettings) -> AsyncIterator[tuple[CacheCalls, Bar]]:
    """As :func:`cell`, with the line of progress for what the block has to say."""
    with shown("connecting to the broker") as bar:
        async with calls_of(broker) as calls:
            bar.say("asking the cell")
            yield calls, bar
