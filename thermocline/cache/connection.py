"""A connection to the cell's broker for as long as a verb runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.cache_calls import CacheCalls
from shared.broker import BrokerSettings
from shared.bus.nats_bus import connect_with
from shared.errors import Unavailable
from shared.ids import namespace_digest
from shared.progress_line import Bar, shown

CONNECT_S = 5.0


@asynccontextmanager
async def calls_of(broker: BrokerSettings) -> AsyncIterator[CacheCalls]:
    """Yield the calls of a cell, over a connection that is closed afterwards.

    Raises Unavailable when no broker answers in time, ConfigError when all refuse.
    """
    bus = await connect_with(broker, "cache", timeout_s=CONNECT_S)
    try:
        yield CacheCalls(bus)
    finally:
        await bus.close()


@asynccontextmanager
async def cell(broker: BrokerSettings) -> AsyncIterator[CacheCalls]:
    """Yield the calls of a cell and show progress on stderr; the block must not print."""
    async with watched(broker) as (calls, _):
        yield calls


async def namespace_of(calls: CacheCalls, salt: str) -> str:
    """Return the namespace of the cell's model under this ``cache_salt``. Raises Unavailable while none is known."""
    model = (await calls.status()).model
    if not model:
        raise Unavailable("no worker has joined, so that the model's namespace is not known")
    return namespace_digest(model, salt=salt)


@asynccontextmanager
async def watched(broker: BrokerSettings) -> AsyncIterator[tuple[CacheCalls, Bar]]:
    """Yield the calls of a cell and the progress line, so that the block can report its own progress."""
    with shown("connecting to the broker") as bar:
        async with calls_of(broker) as calls:
            bar.say("asking the cell")
            yield calls, bar
