"""The tiers below host memory in a whole storage: what is saved comes back, bit by bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.storage import chunk_writing
from services.storage.backends import ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.chunk_format import blob_nbytes
from services.storage.media import Media
from shared.chunks import chunk_pages
from shared.compact_messages import compact_save
from shared.ids import namespace_digest, split_digests
from shared.messages.pools import KvGeometry
from shared.messages.storage_events import (
    ChunksDropped,
    ChunksFetched,
    ChunksListed,
)
from shared.messages.storage_plans import DiskQuota, DropChunks, PinChunks
from tests.integration.storage_cell import (
    BLOB_BYTES,
    NAMESPACE,
    GatedBackend,
    Sequence,
    StorageCell,
    flip_byte,
    gated_memory,
    running_storage,
)
from tests.memory_backend import MemoryBackend

pytestmark = pytest.mark.integration


async def _compared(cell: StorageCell) -> None:
    """Wait until disk and store were compared once, and what was found is done with."""
    async with asyncio.timeout(20.0):
        while not (await cell.inventory()).counters["reconcile_passes"]:
            await asyncio.sleep(0.01)
    await cell.idle()


@pytest.mark.parametrize(("page_size", "is_compact"), [(1, False), (16, False), (64, False), (16, True)])
async def test_what_is_saved_from_the_device_is_fetched_bit_by_bit(
    prefix: str, tmp_path: Path, page_size: int, *, is_compact: bool
) -> None:
    """Pages of any size go to files and come back to other host pages, sealed with the same checksums."""
    geometry = KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=page_size, dtype="bfloat16")
    per_chunk = chunk_pages(page_size)
    chunks = 1 if page_size == 1 else 2
    sequence = Sequence.make(1, chunks, geometry=geometry)
    device = [(7 * page) % 64 for page in range(sequence.pages)]
    host = list(range(63, 63 - sequence.pages, -1))
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)])), geometry=geometry) as cell:
        order = cell.save_order(sequence, device=device)
        saved = await cell.saved(compact_save(order) if is_compact else order)
        fetched = await cell.fetch(sequence, host)

        assert (saved.chunks, saved.is_all) == ((b"", True) if is_compact else (b"".join(sequence.names), False))
        assert (saved.error, saved.dropped, saved.nbytes) == ("", b"", chunks * blob_nbytes(geometry))
        assert (fetched.chunks, fetched.disk_chunks, fetched.missing, fetched.error) == (chunks, chunks, b"", "")
        assert cell.holds(sequence, list(range(per_chunk * chunks)), host, device)


async def test_what_is_saved_from_host_memory_is_fetched(prefix: str, tmp_path: Path) -> None:
    """A save may take some pages from the host pool and others from a device; pages nobody wants are left out."""
    sequence = Sequence.make(1, 2)
    device = list(range(8))
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.backup(sequence, device[:6], list(range(6)))
        saved = await cell.save(sequence, host=[0, 1, 2, 3, 4, 5, -1, -1], device=[-1] * 6 + [6, 7])
        fetched = await cell.fetch(sequence, [-1, 20, 21, 22, 30, 31, 32, -1])

        assert saved.chunks == b"".join(sequence.names)
        assert fetched.chunks == 2
        assert cell.holds(sequence, [1, 2, 3, 4, 5, 6], [20, 21, 22, 30, 31, 32], [1, 2, 3, 4, 5, 6])


async def test_an_owners_quota_bounds_its_chunks(prefix: str, tmp_path: Path) -> None:
    """A save beyond it displaces what its owner has, a lowered one at once, and nobody else's chunks ever."""
    other = Sequence.make(1, 2)
    own = [Sequence.make(kind, 2, namespace=namespace_digest(f"own-{kind}")) for kind in (2, 3)]

    def quota(chunks: int) -> DiskQuota:
        return DiskQuota(owner="owner", disk_bytes=chunks * BLOB_BYTES)

    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.save(other, device=list(range(8)), quota=DiskQuota(owner="other"))
        await cell.save(own[0], device=list(range(8, 16)), quota=quota(3))
        second = await cell.save(own[1], device=list(range(16, 24)), quota=quota(3))
        await cell.fetch(own[0], list(range(8)), quota=quota(1))
        lowered = await cell.event(ChunksDropped)
        there = await cell.fetch(other, list(range(8)))

    assert (second.error, second.dropped) == ("", own[0].names[1])
    assert len(split_digests(lowered.chunks)) == 2
    assert there.disk_chunks == 2


async def test_the_quota_is_kept_by_worth(prefix: str) -> None:
    """Beyond the quota the least worth goes, the end of a prefix before its beginning; a pinned prefix stays."""
    pinned, cold, hot = Sequence.make(1, 2), Sequence.make(2, 2), Sequence.make(3, 2)
    quota = 2**20
    fits = quota // BLOB_BYTES
    filler = Sequence.make(4, fits - 4, namespace=namespace_digest("filler"))
    async with running_storage(prefix, Media(gated_memory()), disk_kv_bytes=quota) as cell:
        await cell.order(PinChunks(chunks=b"".join(pinned.names)))
        await cell.save(pinned, device=list(range(8)))
        await cell.save(cold, device=list(range(8, 16)))
        await cell.save(filler, device=[page % 64 for page in range(filler.pages)], value=1000.0)
        saved = await cell.save(hot, device=list(range(16, 24)), value=1000.0)
        counters = (await cell.inventory()).counters
        kept = await cell.fetch(pinned, list(range(8)))
        gone = await cell.fetch(cold, list(range(8)))

    assert saved.chunks == b"".join(hot.names)
    assert saved.dropped == cold.names[1] + cold.names[0]
    assert counters["disk_bytes"] <= quota
    assert counters["chunks_evicted"] == 2
    assert (kept.chunks, gone.chunks, gone.missing) == (2, 0, b"".join(cold.names))


async def test_what_another_storage_saved_comes_from_the_object_store_and_stays(prefix: str) -> None:
    """A save is uploaded; a second storage fetches it remotely, writes it to its disk, and says so."""
    store = MemoryBackend(max_bytes=2**30)
    sequence = Sequence.make(1, 2)
    async with running_storage(prefix, Media(gated_memory(), GatedBackend(store))) as cell:
        await cell.save(sequence, device=list(range(8)))
        await cell.uploaded(2)
    disk = MemoryBackend(max_bytes=2**30)
    async with running_storage(prefix, Media(disk, GatedBackend(store)), io_threads=8) as cell:
        far = await cell.fetch(sequence, list(range(8)))
        listed = b""
        while len(listed) < 32:
            listed += (await cell.event(ChunksListed)).chunks
        near = await cell.fetch(sequence, list(range(20, 28)))

        assert (far.chunks, far.disk_chunks, far.remote_chunks) == (2, 0, 2)
        assert sorted([listed[:16], listed[16:]]) == sorted(sequence.names)
        assert (near.chunks, near.disk_chunks, near.remote_chunks) == (2, 2, 0)
        assert cell.holds(sequence, list(range(8)), list(range(20, 28)), list(range(8)))


async def test_what_is_on_the_disk_already_goes_to_a_store_that_is_added(prefix: str, tmp_path: Path) -> None:
    """The first start had no store, the second one has: no order is needed, and what rotted meanwhile stays away."""
    sequence = Sequence.make(1, 3)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(prefix, media) as cell:
        await cell.save(sequence, device=list(range(12)))
    media.close()
    (rotten,) = tmp_path.rglob(f"{sequence.names[1].hex()}.chunk")
    flip_byte(rotten, BLOB_BYTES // 2)
    store = MemoryBackend(max_bytes=2**30)

    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]), store)) as cell:
        await cell.uploaded(2)
        counters = await cell.idle()
        dropped = await cell.event(ChunksDropped)
    async with running_storage(prefix, Media(None, store)) as cell:
        fetched = await cell.fetch(sequence, list(range(12)))
        is_equal = cell.holds(sequence, list(range(4)), list(range(4)), list(range(4)))

    assert sorted(entry.key.identity for entry in store.entries()) == sorted([sequence.names[0], sequence.names[2]])
    assert (counters["reconcile_found"], dropped.chunks) == (3, sequence.names[1])
    assert (fetched.remote_chunks, is_equal) == (1, True)


class _Together(MemoryBackend):
    """Answers reads once so many are under way, and none before."""

    def __init__(self, count: int) -> None:
        super().__init__(max_bytes=2**30)
        self._count = count
        self._asked = 0
        self._enough = asyncio.Event()

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        self._asked += 1
        if self._asked == self._count:
            self._enough.set()
        await self._enough.wait()
        return await super().fetch(key, most, timeout_s=timeout_s)


async def test_a_whole_prefix_is_asked_of_the_object_store_at_once(prefix: str) -> None:
    """However few threads there are: round trips do not add up. Without a disk a save is of no chunk on it."""
    sequence = Sequence.make(1, 16)
    store = _Together(16)
    async with running_storage(prefix, Media(None, store), io_threads=1) as cell:
        saved = await cell.save(sequence, device=list(range(64)))
        fetched = await cell.fetch(sequence, list(range(64)))

    assert (saved.chunks, saved.error) == (b"", "")
    assert (fetched.chunks, fetched.remote_chunks, fetched.error) == (16, 16, "")


async def test_an_owner_keeps_within_its_quota_of_the_object_store(prefix: str) -> None:
    """Of four chunks of a bounded owner the first two go there; another's goes as well, and a flush gives room."""
    store = MemoryBackend(max_bytes=2**30)
    bounded, free = Sequence.make(1, 4), Sequence.make(2, 1, namespace="f" * 32)
    quota = DiskQuota(owner="acme", remote_bytes=2 * BLOB_BYTES)
    async with running_storage(prefix, Media(None, store)) as cell:
        full = await cell.save(bounded, device=list(range(16)), quota=quota)
        other = await cell.save(free, device=list(range(16, 20)))
        kept = sorted(entry.key.identity for entry in store.entries())
        await cell.order(DropChunks(namespace=bounded.namespace, tiers=("remote",)))
        await cell.idle()
        again = await cell.save(bounded, device=list(range(20, 24)), chunks=1, quota=quota)

    assert "quota" in full.error
    assert kept == sorted([*bounded.names[:2], free.names[0]])
    assert (other.error, again.error) == ("", "")


async def test_an_owner_keeps_within_its_quota_of_a_store_after_a_restart(prefix: str, tmp_path: Path) -> None:
    """The disk may hold more of it than the store: what is found there is not uploaded beyond the quota."""
    store, sequence = MemoryBackend(max_bytes=2**30), Sequence.make(1, 4)
    quota = DiskQuota(owner="acme", remote_bytes=2 * BLOB_BYTES)
    for _ in range(2):
        media = Media(DiskBackend([str(tmp_path)]), store)
        async with running_storage(prefix, media, disk_dir=(str(tmp_path),)) as cell:
            if not list(store.entries()):
                await cell.save(sequence, device=list(range(16)), quota=quota)
            await _compared(cell)
        assert media.disk is not None
        media.disk.close()

    assert len(list(store.entries())) == 2


def _spoil(store: MemoryBackend, damage: str) -> None:
    """Put something else in the place of the only object."""
    (entry,) = list(store.entries())
    blob = memoryview(bytearray(entry.nbytes))
    store.get(entry.key, blob, timeout_s=1.0)
    blob[-1 if damage == "payload" else 40] ^= 1
    store.delete(entry.key, timeout_s=1.0)
    store.put(entry.key, blob[: 4096 if damage == "cut short" else None], stripe=0, timeout_s=1.0)


@pytest.mark.parametrize(
    ("damage", "with_disk"), [("payload", False), ("header", False), ("cut short", False), ("payload", True)]
)
async def test_a_damaged_object_is_replaced(prefix: str, damage: str, with_disk: bool) -> None:
    """It is not served, and stays until its chunk is saved again, which writes over it."""
    store = MemoryBackend(max_bytes=2**30)
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(None, store)) as cell:
        await cell.save(sequence, device=list(range(4)))
    _spoil(store, damage)
    async with running_storage(prefix, Media(gated_memory() if with_disk else None, store)) as cell:
        bad = await cell.fetch(sequence, list(range(4)))
        await cell.save(sequence, device=list(range(4)))
        await cell.idle()
    async with running_storage(prefix, Media(None, store)) as cell:
        good = await cell.fetch(sequence, list(range(4)))
        is_equal = cell.holds(sequence, list(range(4)), list(range(4)), list(range(4)))

    assert (bad.chunks, good.remote_chunks, is_equal) == (0, 1, True)
    assert bad.error


async def test_progress_is_told_a_few_times(prefix: str) -> None:
    """A long fetch sends at most eight events on the way, each of a longer prefix, then the last."""
    sequence = Sequence.make(1, 16)
    async with running_storage(prefix, Media(gated_memory())) as cell:
        await cell.save(sequence, device=list(range(64)))
        await cell.fetch(sequence, list(range(64)))
        events = [event for event in cell.seen if isinstance(event, ChunksFetched)]

    assert 2 <= len(events) <= 9
    counts = [event.chunks for event in events]
    assert counts == sorted(set(counts))
    assert [event.is_over for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize("has_store", [False, True])
async def test_a_saved_blob_is_hashed_for_an_upload_alone(
    prefix: str, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    """Its pages are hashed once; the blob as a whole only where somebody will compare it."""
    digest, hashed = chunk_writing.blob_digest, []

    def noted(blob: memoryview) -> int:
        hashed.append(blob.nbytes)
        return digest(blob)

    monkeypatch.setattr(chunk_writing, "blob_digest", noted)
    store = MemoryBackend(max_bytes=2**30) if has_store else None
    async with running_storage(prefix, Media(MemoryBackend(max_bytes=2**30), store)) as cell:
        saved = await cell.save(Sequence.make(1, 2), device=list(range(8)))

    assert (saved.error, len(hashed)) == ("", 2 if has_store else 0)


async def test_a_dropped_namespace_is_gone_everywhere(prefix: str) -> None:
    """Its chunks leave disk and object store, each is reported, and other namespaces stay."""
    mine, other = Sequence.make(1, 2), Sequence.make(1, 1, namespace=namespace_digest("other"))
    disk, store = MemoryBackend(max_bytes=2**30), MemoryBackend(max_bytes=2**30)
    async with running_storage(prefix, Media(disk, store)) as cell:
        await cell.save(mine, device=list(range(8)))
        await cell.save(other, device=list(range(4)))
        await cell.uploaded(3)
        await cell.order(DropChunks(namespace=NAMESPACE))
        dropped = await cell.event(ChunksDropped)
        async with asyncio.timeout(20.0):
            while len(list(store.entries())) + len(list(disk.entries())) > 2:
                await asyncio.sleep(0.01)
        gone = await cell.fetch(mine, list(range(8)))
        kept = await cell.fetch(other, list(range(4)))

    assert sorted([dropped.chunks[:16], dropped.chunks[16:]]) == sorted(mine.names)
    assert (gone.chunks, kept.chunks) == (0, 1)
