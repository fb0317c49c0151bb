"""Orders for the tiers below host memory: each is answered once, in time, and none gets in another's way."""

from __future__ import annotations

import asyncio

import pytest

from services.storage.media import Media
from shared.messages.base import pack_int32
from shared.messages.status import VerifyChunks
from shared.messages.storage_events import (
    BackupDone,
    ChunksSaved,
    StorageLeft,
)
from shared.messages.storage_plans import CancelFetch, DetachDevicePool, PinChunks
from tests.cases import case
from tests.integration.storage_cell import (
    Sequence,
    gated_memory,
    make_pools,
    running_storage,
)

pytestmark = pytest.mark.integration


async def test_a_host_page_is_read_before_a_later_order_writes_it(prefix: str) -> None:
    """A save that waits for a buffer still finds its host pages when later orders have got them."""
    disk = gated_memory()
    first, second, third = (Sequence.make(seed, 1) for seed in (1, 2, 3))
    # Two buffers, of which saves get one: the second save waits until the first is written.
    staging = 2**20
    async with running_storage(prefix, Media(disk), io_threads=1, staging_bytes=staging) as cell:
        await cell.backup(first, [0, 1, 2, 3], [0, 1, 2, 3])
        await cell.backup(second, [4, 5, 6, 7], [4, 5, 6, 7])
        disk.put_gate.clear()
        stuck = [Sequence.make(seed, 1) for seed in range(100, 150)]
        for sequence in stuck:
            await cell.order(cell.save_order(sequence, device=[8, 9, 10, 11]))
        await cell.order(cell.save_order(second, host=[4, 5, 6, 7]))
        await cell.order(cell.backup_order(third, [12, 13, 14, 15], [4, 5, 6, 7]))
        await asyncio.to_thread(disk.put_entered.wait, 20.0)
        disk.put_gate.set()
        for _ in stuck:
            await cell.event(ChunksSaved)
        saved = await cell.event(ChunksSaved)
        done = [event for event in cell.seen if isinstance(event, BackupDone)]
        if len(done) < 3:
            done.append(await cell.event(BackupDone))
        fetched = await cell.fetch(second, [20, 21, 22, 23])

        assert saved.chunks == second.names[0]
        assert all(event.ok for event in done)
        assert fetched.chunks == 1
        assert cell.holds(second, [0, 1, 2, 3], [20, 21, 22, 23], [4, 5, 6, 7])
        assert cell.holds(third, [0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15])


async def test_a_cancelled_fetch_writes_nothing_more(prefix: str) -> None:
    """What the read that runs brings is thrown away; after the last event no host page changes."""
    disk = gated_memory()
    sequence = Sequence.make(1, 3)
    async with running_storage(prefix, Media(disk)) as cell:
        await cell.save(sequence, device=list(range(12)))
        disk.get_gate.clear()
        fetch = cell.fetch_order(sequence, list(range(12)))
        await cell.order(fetch)
        await asyncio.to_thread(disk.get_entered.wait, 20.0)
        await cell.order(CancelFetch(fetch_id=fetch.fetch_id))
        while (await cell.inventory()).last_plan < 5:
            await asyncio.sleep(0)
        disk.get_gate.set()
        fetched = await cell.fetched(fetch.fetch_id)

        assert (fetched.chunks, fetched.error) == (0, "cancelled")
        assert cell.host is not None
        assert not cell.host.identities.any()
        assert (await cell.fetch(sequence, list(range(12)))).chunks == 3


async def test_a_fetch_ends_at_its_deadline(prefix: str) -> None:
    """A disk that hangs costs the time that the order allows, and its last event says so; nothing is read later."""
    disk = gated_memory()
    sequence = Sequence.make(1, 2)
    async with running_storage(prefix, Media(disk)) as cell:
        await cell.save(sequence, device=list(range(8)))
        disk.get_gate.clear()
        disk.patience_s = 600.0
        late = await cell.fetch(sequence, list(range(8)), deadline_ms=30)
        none = await cell.fetch(sequence, list(range(8)), deadline_ms=0)
        disk.get_gate.set()
        again = await cell.fetch(sequence, list(range(8, 16)))

        assert (late.chunks, late.is_over, none.chunks) == (0, True, 0)
        assert (late.error, none.error) == ("its deadline passed", "its deadline passed")
        assert (late.missing, again.chunks) == (b"", 2)
        assert cell.host is not None
        assert not cell.host.identities[:8].any()


async def test_saves_beyond_the_bound_are_refused(prefix: str) -> None:
    """One save too many is answered at once; those that wait are done."""
    disk = gated_memory()
    disk.put_gate.clear()
    async with running_storage(prefix, Media(disk), max_saves=2) as cell:
        for seed in (1, 2, 3):
            await cell.order(cell.save_order(Sequence.make(seed, 1), device=list(range(4))))
        refused = await cell.event(ChunksSaved)
        disk.put_gate.set()
        others = [await cell.event(ChunksSaved), await cell.event(ChunksSaved)]

    assert (refused.save_id, refused.chunks) == (3, b"")
    assert "2 saves" in refused.error
    assert all(len(event.chunks) == 16 for event in others)


BAD_SAVES: list[tuple[dict[str, object], str]] = [
    ({"namespace": "../../etc"}, "no namespace"),
    ({"depth": 3}, "not a multiple"),
    ({"depth": 64}, "cannot be above"),
    ({"tokens": b"x"}, "bytes of tokens"),
    ({"tokens": pack_int32(range(64))}, "wrong identity"),
    ({"identities": b"x" * 16}, "whole chunks"),
    ({"device_pages": pack_int32([0, 1, 2, 99])}, "device pages"),
    ({"device_pages": pack_int32([-1] * 4)}, "no source"),
    ({"host_pages": pack_int32([64] * 4)}, "host pages"),
    ({"worker_id": "w9"}, "no device pool"),
]


async def test_a_bad_save_is_answered(prefix: str) -> None:
    """No bad order ends the storage: it says what is wrong and goes on."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory())) as cell:
        for change, reason in BAD_SAVES:
            with case(reason=reason):
                refused = await cell.save(sequence, device=list(range(4)), **change)

                assert reason in refused.error
                assert refused.chunks == b""
        saved = await cell.save(sequence, device=list(range(4)))

    assert saved.chunks == sequence.names[0]


async def test_a_bad_fetch_is_answered(prefix: str) -> None:
    """Pages that do not exist, or twice the same, are refused."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory())) as cell:
        outside = await cell.fetch(sequence, [0, 1, 2, 64])
        twice = await cell.fetch(sequence, [0, 1, 2, 2])
        nowhere = await cell.fetch(sequence, list(range(4)))

    assert "host pages" in outside.error
    assert "twice" in twice.error
    assert (nowhere.chunks, nowhere.missing, nowhere.error) == (0, sequence.names[0], "")


async def test_a_detached_pool_is_not_read(prefix: str) -> None:
    """A save that waits when its worker's pool goes is answered with the reason; those that were read are done."""
    disk = gated_memory()
    disk.put_gate.clear()
    sequences = [Sequence.make(seed, 1) for seed in (1, 2, 3)]
    async with running_storage(prefix, Media(disk), io_threads=1) as cell:
        for sequence in sequences:
            await cell.order(cell.save_order(sequence, device=list(range(4))))
        await asyncio.to_thread(disk.put_entered.wait, 20.0)
        await cell.order(DetachDevicePool(worker_id="w0", worker_incarnation="i0"))
        while (await cell.inventory()).last_plan < 6:
            await asyncio.sleep(0)
        disk.put_gate.set()
        answers = sorted([await cell.event(ChunksSaved) for _ in sequences], key=lambda event: event.save_id)

    assert answers[0].chunks == sequences[0].names[0]
    assert answers[2].chunks == b""
    assert "no device pool" in answers[2].error


async def test_a_stop_answers_what_was_ordered(prefix: str) -> None:
    """The chunk that is being written is finished, the others are given up, each save is answered before the end."""
    disk = gated_memory()
    disk.put_gate.clear()
    async with running_storage(prefix, Media(disk), io_threads=1, staging_bytes=2**20) as cell:
        for seed in (1, 2, 3, 4):
            await cell.order(cell.save_order(Sequence.make(seed, 1), device=list(range(4))))
        await asyncio.to_thread(disk.put_entered.wait, 20.0)
        while (await cell.inventory()).counters.get("saves_outstanding") != 4:
            await asyncio.sleep(0)
        cell.life.stop()
        disk.put_gate.set()
        await cell.event(StorageLeft)
        answers = [event for event in cell.seen if isinstance(event, ChunksSaved)]

    assert sorted(event.save_id for event in answers) == [1, 2, 3, 4]
    assert any(event.chunks for event in answers)
    assert all(event.chunks or "stopping" in event.error for event in answers)


async def test_orders_before_the_pool_are_answered(prefix: str) -> None:
    """Without a host pool there is nothing to save from or to fetch to; the storage says so and goes on."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory()), with_pools=False) as cell:
        saved = await cell.save(sequence, device=list(range(4)))
        fetched = await cell.fetch(sequence, list(range(4)))
        await cell.order(CancelFetch(fetch_id=77))
        await cell.order(PinChunks(chunks=b"short"))
        verified = await cell.verify(VerifyChunks())
        await make_pools(cell, prefix)
        later = await cell.save(sequence, device=list(range(4)))

    assert "no host pool" in saved.error
    assert "no host pool" in fetched.error
    assert verified.checked == 0
    assert later.chunks == sequence.names[0]
