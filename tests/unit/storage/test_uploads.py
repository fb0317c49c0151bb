"""Uploads: behind, bounded, many at once, tried again, and never of what the disk has spoilt."""

from __future__ import annotations

import asyncio

import pytest

from services.storage.backends import ChunkKey, IsStale, Stored
from services.storage.chunk_writing import blob_digest
from services.storage.remote_tier import OVER_QUOTA
from services.storage.uploads import MOST_TRIES, Upload
from shared.errors import KeyMissing
from tests.chunk_makers import MadeChunk, make_chain
from tests.memory_backend import MemoryBackend
from tests.unit.storage.upload_cell import NBYTES, GatedStore, uploading

CHAIN = make_chain(3, seed=2)
WIDTH = 32


def _upload(chunk: MadeChunk) -> Upload:
    return Upload(chunk.key, chunk.blob.nbytes, blob_digest(chunk.blob))


def _spoil(files: MemoryBackend, chunk: MadeChunk) -> None:
    bad = bytearray(chunk.blob)
    bad[5000] ^= 1
    files.delete(chunk.key, timeout_s=1.0)
    files.put(chunk.key, memoryview(bad), stripe=0, timeout_s=1.0)


async def test_what_is_on_the_disk_is_uploaded() -> None:
    """Blobs arrive as they were written; one whose file is gone is left out."""
    async with uploading(GatedStore(), CHAIN) as cell:
        cell.files.delete(CHAIN[1].key, timeout_s=1.0)
        for chunk in CHAIN:
            cell.uploads.add(_upload(chunk))
        await cell.idle()

        assert sorted(entry.key for entry in cell.store.entries()) == sorted([CHAIN[0].key, CHAIN[2].key])
        assert cell.remote.uploaded == 2


async def test_what_the_disk_has_spoilt_is_not_uploaded() -> None:
    """A blob that is not what was written stays where it is."""
    async with uploading(GatedStore(), CHAIN) as cell:
        _spoil(cell.files, CHAIN[0])
        cell.uploads.add(_upload(CHAIN[0]))
        await cell.idle()

        assert cell.store.tries == 0


async def test_what_an_earlier_process_wrote_is_verified_first() -> None:
    """A sound chunk is uploaded; one that rotted leaves the disk, and the scheduler is told."""
    async with uploading(GatedStore(), CHAIN) as cell:
        _spoil(cell.files, CHAIN[1])
        for chunk in CHAIN:
            cell.uploads.add(Upload(chunk.key, NBYTES))
        await cell.idle()

        assert sorted(entry.key for entry in cell.store.entries()) == sorted([CHAIN[0].key, CHAIN[2].key])
        assert cell.events.gone == [CHAIN[1].key]
        assert CHAIN[1].key not in cell.disk


async def test_many_are_under_way_at_once() -> None:
    """As many as the width says, whatever there are threads; the line behind them is bounded."""
    chain = make_chain(WIDTH + 4, seed=3)
    async with uploading(GatedStore(), chain, width=WIDTH, max_waiting=3) as cell:
        cell.store.gate.clear()
        for chunk in chain[:WIDTH]:
            cell.uploads.add(_upload(chunk))
            await asyncio.sleep(0)
        async with asyncio.timeout(20.0):
            while cell.store.at_once < WIDTH:
                await asyncio.sleep(0.001)
        for chunk in chain[WIDTH:]:
            cell.uploads.add(_upload(chunk))
        await asyncio.sleep(0)
        at_once, left_out = cell.store.at_once, cell.uploads.left_out
        cell.store.gate.set()
        await cell.idle()

        assert (at_once, left_out, cell.remote.uploaded) == (WIDTH, 1, WIDTH + 3)


async def test_bytes_under_way_are_bounded() -> None:
    """Two chunks fit at once, and one that is larger than the bound goes alone."""
    for most_bytes, expected in ((2 * NBYTES, 2), (1, 1)):
        async with uploading(GatedStore(), CHAIN, most_bytes=most_bytes) as cell:
            cell.store.gate.clear()
            for chunk in CHAIN:
                cell.uploads.add(_upload(chunk))
            async with asyncio.timeout(20.0):
                while cell.store.at_once < expected:
                    await asyncio.sleep(0.001)
            under_way = len(cell.uploads._running)
            cell.store.gate.set()
            await cell.idle()

            assert (under_way, cell.remote.uploaded) == (expected, 3)


@pytest.mark.parametrize(("failures", "uploaded"), [(MOST_TRIES - 1, 1), (MOST_TRIES, 0)])
async def test_a_failed_upload_is_tried_again_a_few_times(failures: int, uploaded: int) -> None:
    """Then it is given up, so that one bad object does not hold up the line for ever, and counted as left out."""
    async with uploading(GatedStore(failures), CHAIN) as cell:
        cell.uploads.add(_upload(CHAIN[0]))
        await cell.idle()

        assert (cell.remote.uploaded, cell.remote.upload_failures) == (uploaded, failures)
        assert (cell.store.tries, cell.uploads.left_out) == (MOST_TRIES, 1 - uploaded)


async def test_a_chunk_whose_key_is_gone_is_no_failure_of_the_store() -> None:
    """It is asked for once, and holds up no other."""

    class Keyless(GatedStore):
        async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
            stored = await super().store(key, blob, is_stale, timeout_s=timeout_s)
            if key == CHAIN[0].key:
                raise KeyMissing("its tenant is gone")
            return stored

    async with uploading(Keyless(), CHAIN) as cell:
        for chunk in CHAIN:
            cell.uploads.add(_upload(chunk))
        await cell.idle()

        assert (cell.store.tries, cell.remote.uploaded) == (len(CHAIN), len(CHAIN) - 1)
        assert (cell.remote.upload_failures, cell.uploads.left_out) == (0, 0)


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_namespace_that_is_dropped_is_not_uploaded_any_more(failures: int) -> None:
    """What waits is forgotten, and what is under way can be waited for; if it fails, it is not tried again."""
    async with uploading(GatedStore(failures), CHAIN, width=1) as cell:
        cell.store.gate.clear()
        for chunk in CHAIN:
            cell.uploads.add(_upload(chunk))
        async with asyncio.timeout(20.0):
            while not cell.store.at_once:
                await asyncio.sleep(0.001)
        cell.uploads.forget("ff" * 16)
        kept = len(cell.uploads)
        cell.uploads.forget(CHAIN[0].key.namespace)
        ended = asyncio.create_task(cell.uploads.ended(CHAIN[0].key.namespace))
        await asyncio.sleep(0)
        is_early = ended.done()
        cell.store.gate.set()
        await ended

        assert (kept, len(cell.uploads), is_early) == (3, 0, False)
        assert (cell.remote.uploaded, cell.uploads.left_out) == (1 - failures, 0)


async def test_what_would_go_beyond_an_owners_quota_is_not_uploaded() -> None:
    """What the store had of the owner before counts; others go on, and nothing is tried again."""
    async with uploading(GatedStore(), CHAIN, width=1) as cell:
        cell.store.put(CHAIN[0].key, CHAIN[0].blob, stripe=0, timeout_s=1.0)
        cell.remote.owners.learn(CHAIN[0].key.namespace, "acme", 2 * NBYTES)
        for chunk in CHAIN:
            cell.uploads.add(_upload(chunk))
        await cell.idle()

        # The first was there and took no more room, the second fits, the third does not.
        assert sorted(entry.key for entry in cell.store.entries()) == sorted([CHAIN[0].key, CHAIN[1].key])
        assert cell.store.tries == 2
        assert await cell.remote.write(CHAIN[2].key, CHAIN[2].blob) == OVER_QUOTA

        cell.remote.owners.learn(CHAIN[0].key.namespace, "acme", 3 * NBYTES)
        assert await cell.remote.write(CHAIN[2].key, CHAIN[2].blob) == ""
        assert (cell.remote.upload_failures, cell.uploads.left_out) == (0, 0)
