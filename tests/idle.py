"""Waiting until a cell is idle, and the claim about pages that must hold then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import Unavailable
from shared.messages.status import CellStatus, GetStatus

ANSWERS_S = 120.0
"""Longest wait for a scheduler that answers."""


async def ask_status(bus: Bus) -> CellStatus:
    """What the scheduler thinks. Raises Unavailable when none answers."""
    return decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)


async def status_from(bus: Bus) -> CellStatus:
    """The same, once a scheduler answers: on busy cores one may lose the lead for a moment, and one may be starting."""
    async with asyncio.timeout(ANSWERS_S):
        while True:
            with contextlib.suppress(Unavailable):
                return await ask_status(bus)
            await asyncio.sleep(0.02)


async def status_at(nats_url: str) -> CellStatus:
    """The same over a connection of its own."""
    bus = await connect((nats_url,), "test")
    try:
        return await status_from(bus)
    finally:
        await bus.close()


async def settled(
    status_of: Callable[[], Awaitable[CellStatus]], *, workers: int | None = None, timeout_s: float = 60.0
) -> CellStatus:
    """Wait until nothing runs, waits or moves (and all ``workers`` are there); then free + cached = total in every
    pool.
    """
    async with asyncio.timeout(timeout_s):
        while not _is_idle(status := await status_of(), workers):
            await asyncio.sleep(0.02)
    for pool in status.pools:
        assert pool.free + pool.cached == pool.total, pool
    return status


async def hears_of_chunks(
    status_of: Callable[[], Awaitable[CellStatus]], count: int, *, timeout_s: float = 60.0
) -> None:
    """Wait until the scheduler knows of a host pool and of so many chunks on disks, in either form: a cell serves
    before its storage is there, and a storage lists its disk after it has joined.
    """
    status = await status_of()
    try:
        async with asyncio.timeout(timeout_s):
            while status.chunks_in_all < count or not any(pool.tier == "host" for pool in status.pools):
                await asyncio.sleep(0.01)
                status = await status_of()
    except TimeoutError:
        raise AssertionError(
            f"the scheduler knows of {status.chunks} chunks of KV and {status.hidden_chunks} hidden ones, not {count}; "
            f"storages {status.storage_incarnations}, pools {status.pools}, counters {status.counters}"
        ) from None


def _is_idle(status: CellStatus, workers: int | None) -> bool:
    leased = any(pool.leased for pool in status.pools)
    complete = workers is None or len(status.workers) == workers
    moves = status.fetches or status.saves
    return complete and not status.queued and not status.running and not leased and not moves
