"""What operators ask of a cell over the bus, against a scripted scheduler and storage."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.cache_calls import CacheCalls, PinRefused
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.codec import decode, encode
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.messages.base import pack_int32
from shared.messages.cell_events import PinPrefix
from shared.messages.status import ChunksVerified, ListCache, VerifyChunks
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.scripted_cache import NAMESPACE, ScriptedCache, node

ORDER = PinPrefix(pin_id="docs", namespace=NAMESPACE, tokens=pack_int32(range(40)), ttl_ms=1000)


@contextlib.asynccontextmanager
async def scripted(**script: Any) -> AsyncIterator[tuple[CacheCalls, ScriptedCache]]:
    """Calls of one client, and the cell that answers them over a memory bus."""
    broker = MemoryBroker()
    client, server = broker.connect("client"), broker.connect("cell")
    await client.ensure_streams(StreamLimits())
    async with ScriptedCache(server, **script) as cache:
        yield CacheCalls(client), cache
    await client.close()
    await server.close()


async def test_a_listing_goes_on_until_its_limit() -> None:
    """Pages of 256 nodes at the most; where it stops it says how to go on."""
    async with scripted(nodes=[node(number) for number in range(1, 601)]) as (calls, cache):
        part = await calls.listing(limit=300)
        whole = await calls.listing(limit=1000)

    assert [n.id for n in part.nodes] == list(range(1, 301))
    assert (part.next_after, len(whole.nodes), whole.next_after) == (300, 600, 0)
    assert [call.max_nodes for call in cache.calls if isinstance(call, ListCache)] == [256, 44, 256, 256, 256]


async def test_a_pin_is_read_back_after_it_was_folded() -> None:
    """What it holds, or why nothing."""
    async with scripted(holds=32) as (calls, cache):
        held = await calls.pin(ORDER)
        cache.refusal = "the prefix is shorter than one page"
        with pytest.raises(PinRefused, match="shorter than one page"):
            await calls.pin(ORDER)

    assert (held.held_tokens, held.pages, held.refusal) == (32, 2, "")


async def test_unpinning_needs_a_pin() -> None:
    """One that is not there is a typed error, and no order is sent for it."""
    async with scripted() as (calls, cache):
        with pytest.raises(NotFound, match="'docs'"):
            await calls.unpin("docs")
        await calls.pin(ORDER)
        await calls.unpin("docs")

    assert cache.pins == {}
    assert len(cache.orders) == 2


async def test_an_order_that_is_not_folded_is_given_up() -> None:
    """In bounded time, with the advice to come again."""
    async with scripted(folds=False) as (calls, _):
        calls.fold_s = 0.05
        with pytest.raises(Unavailable, match="stays queued") as given_up:
            await calls.flush(("device",))

    assert given_up.value.retry_after_ms > 0


async def test_a_drop_from_disk_is_waited_for() -> None:
    """Until no chunk is left, or their number stood still for a while."""
    async with scripted(disk=["a", "b", "c"]) as (calls, cache):
        empty = await calls.flush(("disk",))
        cache.disk[:] = ["d", "e"]
        ticks = iter(range(1000))
        calls.clock = lambda: float(next(ticks))
        still = await calls._quiet(await calls.status())

    assert (empty.disk_chunks, empty.status.chunks) == (3, 0)
    assert still.chunks == 2


async def test_a_flush_of_other_tiers_counts_no_chunks() -> None:
    """Pages only, as the scheduler counted them."""
    async with scripted(disk=["a"]) as (calls, _):
        flushed = await calls.flush(("device", "host"), NAMESPACE)

    assert (flushed.device_pages, flushed.host_pages, flushed.disk_chunks) == (3, 2, 0)


async def test_a_storage_that_stands_still_is_an_error() -> None:
    """Rather than a walk without end."""
    async with scripted(storages=()) as (calls, cache):

        async def verify(data: bytes) -> bytes:
            call = decode(data, VerifyChunks)
            return encode(ChunksVerified(checked=0, nbytes=0, next_after=call.after or "a"))

        await cache.bus.serve(subjects.rpc("storage", "verify", "storage-0"), verify)
        first = await calls.scrub("storage-0")
        with pytest.raises(InvalidRequest, match="does not get past"):
            await calls.scrub("storage-0", after=first.next_after)

    assert first.next_after == "a"


async def test_who_does_not_answer_is_named() -> None:
    """The scheduler, or the storage by its name; a storage that is asked for its inventory is merely None."""
    async with scripted(storages=()) as (calls, _):
        with pytest.raises(Unavailable, match="storage storage-9"):
            await calls.scrub("storage-9")
        inventories = await calls.inventories(["storage-9"])
    bus = MemoryBroker().connect("alone")
    with pytest.raises(Unavailable, match="the scheduler does not answer"):
        await CacheCalls(bus).status()

    assert inventories == {"storage-9": None}
