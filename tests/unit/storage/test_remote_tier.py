"""Uploads: behind, bounded, tried again, and never of what the disk has spoilt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.storage.backends import ChunkBackend, ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_writing import blob_digest
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import MOST_TRIES, OVER_QUOTA, RemoteTier, Upload
from services.storage.staging import Staging
from shared.errors import TransportError
from tests.chunk_makers import MadeChunk, make_chain
from tests.memory_backend import MemoryBackend

CHAIN = make_chain(3, seed=2)
NBYTES = CHAIN[0].blob.nbytes


class _Store(MemoryBackend):
    """Fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(max_bytes=2**30)
        self.failures = failures
        self.tries = 0
        self.done = asyncio.Event()

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        self.tries += 1
        if self.tries <= self.failures:
            raise TransportError("no route")
        return super().put(key, blob, stripe=stripe, timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.storage.core.tier_health.TierHealth.wait_s", lambda self, now_s: 0.0)


def _upload(chunk: MadeChunk) -> Upload:
    return Upload(chunk.key, 0, chunk.blob.nbytes, blob_digest(chunk.blob))


def _disk() -> MemoryBackend:
    disk = MemoryBackend(max_bytes=2**30)
    for chunk in CHAIN:
        disk.put(chunk.key, chunk.blob, stripe=0, timeout_s=1.0)
    return disk


@asynccontextmanager
async def _uploading(remote: RemoteTier, threads: IoThreads, disk: ChunkBackend) -> AsyncIterator[None]:
    buffers = Buffers(Staging(4 * NBYTES, NBYTES))
    task = asyncio.create_task(remote.run(disk, {CHAIN[0].key.geometry: buffers}))
    yield
    async with asyncio.timeout(20.0):
        # Idle: nothing in line, nobody holds a buffer, and no call runs.
        while remote.waiting or buffers.taken or threads.shares.running(is_urgent=False):
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_on_the_disk_is_uploaded() -> None:
    """Blobs arrive as they were written; one whose file is gone is left out."""
    store, disk, threads = _Store(), _disk(), IoThreads(2)
    disk.delete(CHAIN[1].key, timeout_s=1.0)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    async with _uploading(remote, threads, disk):
        for chunk in CHAIN:
            remote.upload(_upload(chunk))

    assert sorted(entry.key for entry in store.entries()) == sorted([CHAIN[0].key, CHAIN[2].key])
    assert remote.uploaded == 2


async def test_what_the_disk_has_spoilt_is_not_uploaded() -> None:
    """A blob that is not what was written stays where it is."""
    store, disk, threads = _Store(), MemoryBackend(max_bytes=2**30), IoThreads(2)
    bad = bytearray(CHAIN[0].blob)
    bad[5000] ^= 1
    disk.put(CHAIN[0].key, memoryview(bad), stripe=0, timeout_s=1.0)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    async with _uploading(remote, threads, disk):
        remote.upload(_upload(CHAIN[0]))

    assert list(store.entries()) == []
    assert store.tries == 0


@pytest.mark.parametrize(("failures", "uploaded"), [(MOST_TRIES - 1, 1), (MOST_TRIES, 0)])
async def test_a_failed_upload_is_tried_again_a_few_times(failures: int, uploaded: int) -> None:
    """Then it is given up, so that one bad object does not hold up the line for ever."""
    store, threads = _Store(failures), IoThreads(2)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    async with _uploading(remote, threads, _disk()):
        remote.upload(_upload(CHAIN[0]))

    assert (remote.uploaded, remote.upload_failures) == (uploaded, failures)
    assert store.tries == MOST_TRIES


async def test_the_line_is_bounded_and_forgets_a_namespace() -> None:
    """One too many is left out and counted; what is dropped is not uploaded any more."""
    remote = RemoteTier(_Store(), IoThreads(1), timeout_s=1.0, max_uploads=2)
    for chunk in CHAIN:
        remote.upload(_upload(chunk))
    waiting = remote.waiting
    remote.forget("ff" * 16)
    kept = remote.waiting
    remote.forget(CHAIN[0].key.namespace)

    assert (waiting, kept, remote.waiting, remote.upload_failures) == (2, 2, 0, 1)


async def test_what_would_go_beyond_an_owners_quota_is_not_uploaded() -> None:
    """What the store had of the owner before counts; others go on, and nothing is tried again."""
    store, disk, threads = _Store(), _disk(), IoThreads(2)
    store.put(CHAIN[0].key, CHAIN[0].blob, stripe=0, timeout_s=1.0)
    store.tries = 0
    remote = RemoteTier(store, threads, timeout_s=1.0)
    remote.own(CHAIN[0].key.namespace, "acme", 2 * NBYTES)
    async with _uploading(remote, threads, disk):
        for chunk in CHAIN:
            remote.upload(_upload(chunk))

    # The first was there and took no more room, the second fits, the third does not.
    assert sorted(entry.key for entry in store.entries()) == sorted([CHAIN[0].key, CHAIN[1].key])
    assert store.tries == 2
    assert await remote.write(CHAIN[2].key, 0, CHAIN[2].blob) == OVER_QUOTA

    remote.own(CHAIN[0].key.namespace, "acme", 3 * NBYTES)
    assert await remote.write(CHAIN[2].key, 0, CHAIN[2].blob) == ""
    assert remote.upload_failures == 0


async def test_what_was_deleted_leaves_room_once_it_is_counted_again() -> None:
    """A flush of the namespace makes the count void."""
    store, threads = _Store(), IoThreads(2)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    remote.own(CHAIN[0].key.namespace, "acme", NBYTES)
    assert await remote.write(CHAIN[0].key, 0, CHAIN[0].blob) == ""
    assert await remote.write(CHAIN[1].key, 1, CHAIN[1].blob) == OVER_QUOTA

    store.delete(CHAIN[0].key, timeout_s=1.0)
    remote.forget(CHAIN[0].key.namespace)

    assert await remote.write(CHAIN[1].key, 1, CHAIN[1].blob) == ""


async def test_a_store_that_cannot_be_counted_gets_nothing_of_a_bounded_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that cannot be checked is not passed over; the upload counts as failed, and may be tried again."""
    store, threads = _Store(), IoThreads(2)
    remote = RemoteTier(store, threads, timeout_s=1.0)
    remote.own(CHAIN[0].key.namespace, "acme", 10 * NBYTES)

    def lost(namespace: str = "") -> object:
        raise TransportError("no route")

    monkeypatch.setattr(store, "entries", lost)

    assert await remote.write(CHAIN[0].key, 0, CHAIN[0].blob) == "no route"
    assert (store.tries, remote.upload_failures) == (0, 1)
