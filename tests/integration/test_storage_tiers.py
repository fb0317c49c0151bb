"""The tiers below host memory in a whole storage: KV comes back bit by bit, or not at all, whatever goes wrong."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.backends.memory import MemoryBackend
from services.storage.chunk_format import blob_nbytes
from services.storage.cipher import open_cipher
from services.storage.config import StorageConfig
from services.storage.media import Media, open_media
from shared.bus import nats_bus
from shared.bus.protocol import StreamLimits
from shared.chunks import chunk_pages, geometry_id
from shared.codec import Input
from shared.ids import namespace_digest
from shared.memory import unlink_all
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.status import VerifyChunks
from shared.messages.storage_events import (
    BackupDone,
    ChunksDropped,
    ChunksFetched,
    ChunksListed,
    ChunksSaved,
    StorageJoined,
    StorageLeft,
)
from shared.messages.storage_plans import CancelFetch, DetachDevicePool, DropChunks, PinChunks
from tests.integration.storage_cell import (
    BLOB_BYTES,
    FULL,
    GEOMETRY,
    GONE,
    NAMESPACE,
    GatedBackend,
    Sequence,
    StorageCell,
    make_pools,
    running_storage,
)
from tests.nats_server import NatsServer

pytestmark = pytest.mark.integration

KEYS = 'default = "{key}"\n'
KEY_A = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="
KEY_B = "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkI="


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    unlink_all(name)


def _memory() -> GatedBackend:
    return GatedBackend(MemoryBackend(max_bytes=2**30))


def _file_of(directory: Path, name: bytes) -> Path:
    (file,) = directory.rglob(f"{name.hex()}.chunk")
    return file


def _flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
async def test_what_is_saved_from_the_device_is_fetched_bit_by_bit(prefix: str, tmp_path: Path, page_size: int) -> None:
    """Pages of any size go to files and come back to other host pages, sealed with the same checksums."""
    geometry = KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=page_size, dtype="bfloat16")
    per_chunk = chunk_pages(page_size)
    chunks = 1 if page_size == 1 else 2
    sequence = Sequence.make(1, chunks, geometry=geometry)
    device = [(7 * page) % 64 for page in range(sequence.pages)]
    host = list(range(63, 63 - sequence.pages, -1))
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)])), geometry=geometry) as cell:
        saved = await cell.save(sequence, device=device)
        fetched = await cell.fetch(sequence, host)

        assert saved.chunks == b"".join(sequence.names)
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


async def test_a_storage_that_was_given_up_writes_nothing_that_it_read_from_a_device(
    prefix: str, tmp_path: Path
) -> None:
    """Its locks are gone by then, so the pages may hold the KV of others; host pages say themselves whose they are."""
    sequence, other = Sequence.make(1, 2), Sequence.make(2, 1)
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.backup(other, list(range(20, 24)), list(range(4)))
        cell.is_member = False
        from_device = await cell.save(sequence, device=list(range(8)))
        from_host = await cell.save(other, host=list(range(4)))

    assert (from_device.chunks, cell.asked_for_standing) == (b"", 2)
    assert "given this storage up" in from_device.error
    assert from_host.chunks == other.names[0]


async def test_a_host_page_that_was_replaced_is_not_saved(prefix: str) -> None:
    """What a host page really holds is compared with what the order says: the chunk is left out, the rest is saved."""
    sequence, other = Sequence.make(1, 2), Sequence.make(2, 1)
    async with running_storage(prefix, Media(_memory())) as cell:
        await cell.backup(sequence, list(range(8)), list(range(8)))
        await cell.backup(other, [9], [5])
        saved = await cell.save(sequence, host=list(range(8)))

    assert saved.chunks == sequence.names[0]
    assert "replaced" in saved.error


async def test_damaged_host_memory_is_not_saved(prefix: str) -> None:
    """A bit that flipped in host memory does not get to the disk."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(_memory())) as cell:
        await cell.backup(sequence, list(range(4)), list(range(4)))
        assert cell.host is not None
        cell.host.pages[2, 1, 0] ^= 1
        saved = await cell.save(sequence, host=list(range(4)))

    assert saved.chunks == b""
    assert "damaged" in saved.error


async def test_a_restarted_storage_is_warm(prefix: str, tmp_path: Path) -> None:
    """The next incarnation lists what the disk holds, after its host pool, and serves it."""
    sequence = Sequence.make(1, 3)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(prefix, media) as cell:
        await cell.save(sequence, device=list(range(12)))
    media.close()

    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        listed = await cell.event(ChunksListed)
        fetched = await cell.fetch(sequence, list(range(12)))

        assert sorted([listed.chunks[at : at + 16] for at in range(0, 48, 16)]) == sorted(sequence.names)
        assert fetched.disk_chunks == 3
        assert cell.holds(sequence, list(range(12)), list(range(12)), list(range(12)))


@pytest.mark.parametrize("offset", [8, 300, BLOCK_BYTES - 1, BLOCK_BYTES + 5000], ids=["version", "gap", "table", "KV"])
async def test_a_corrupt_chunk_is_missing_and_nothing_behind_it_is_served(
    prefix: str, tmp_path: Path, offset: int
) -> None:
    """One wrong bit in a file: what is before it is served, the chunk is gone and counted, the rest is not served."""
    sequence = Sequence.make(1, 3)
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.save(sequence, device=list(range(12)))
        _flip(_file_of(tmp_path / "chunks", sequence.names[1]), offset)

        fetched = await cell.fetch(sequence, list(range(12)))
        again = await cell.fetch(sequence, list(range(12)))
        counters = (await cell.inventory()).counters

        assert (fetched.chunks, fetched.is_over, fetched.missing) == (1, True, sequence.names[1])
        assert fetched.error
        assert cell.holds(sequence, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
        assert cell.host is not None
        assert not cell.host.identities[4:12].any()
        assert again.missing == sequence.names[1]
        assert counters["chunks_quarantined"] == 1
        assert counters["disk_chunks"] == 2


async def test_a_bad_chunk_is_saved_anew(prefix: str, tmp_path: Path) -> None:
    """A chunk that was quarantined can be saved again and is good then."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.save(sequence, device=list(range(4)))
        _flip(_file_of(tmp_path / "chunks", sequence.names[0]), BLOCK_BYTES)
        bad = await cell.fetch(sequence, list(range(4)))
        saved = await cell.save(sequence, device=list(range(4)))
        good = await cell.fetch(sequence, list(range(4)))

        assert (bad.chunks, saved.chunks, good.chunks) == (0, sequence.names[0], 1)
        assert cell.holds(sequence, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])


async def test_a_full_disk_ends_saves_but_nothing_else(prefix: str) -> None:
    """The disk says it is full although the quota has room: saves fail, without asking it each time; fetches go on."""
    first, second, third = (Sequence.make(seed, 1) for seed in (1, 2, 3))
    disk = _memory()
    async with running_storage(prefix, Media(disk)) as cell:
        await cell.save(first, device=list(range(4)), value=50.0)
        disk.put_error = FULL
        refused = await cell.save(second, device=list(range(4, 8)))
        tries = disk.puts
        later = await cell.save(third, device=list(range(8, 12)))
        fetched = await cell.fetch(second, list(range(4)))

    assert (refused.chunks, later.chunks) == (b"", b"")
    assert "no space left" in refused.error
    assert refused.dropped == first.names[0]  # Tried once to make room.
    assert disk.puts == tries
    assert fetched.is_over


async def test_a_full_disk_is_helped_by_evicting_once(prefix: str) -> None:
    """Where evicting makes room, the save is done, and what went is reported."""
    first, second = Sequence.make(1, 2), Sequence.make(2, 1)
    async with running_storage(prefix, Media(MemoryBackend(max_bytes=2 * BLOB_BYTES))) as cell:
        await cell.save(first, device=list(range(8)))
        saved = await cell.save(second, device=list(range(8, 12)))
        counters = (await cell.inventory()).counters

    assert (saved.chunks, saved.dropped, saved.error) == (second.names[0], first.names[1], "")
    assert counters["disk_chunks"] == 2


async def test_the_quota_is_kept_by_worth(prefix: str) -> None:
    """Beyond the quota the least worth goes, the end of a prefix before its beginning; a pinned prefix stays."""
    pinned, cold, hot = Sequence.make(1, 2), Sequence.make(2, 2), Sequence.make(3, 2)
    quota = 2**20
    fits = quota // BLOB_BYTES
    filler = Sequence.make(4, fits - 4, namespace=namespace_digest("filler"))
    async with running_storage(prefix, Media(_memory()), disk_kv_bytes=quota) as cell:
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


def _cipher(tmp_path: Path, key: str) -> Media:
    file = tmp_path / f"{key[:4]}.toml"
    file.write_text(KEYS.format(key=key))
    file.chmod(0o600)
    cipher = open_cipher(StorageConfig(keys=str(file)), environ={})
    return Media(DiskBackend([str(tmp_path / "disk")]), None, cipher)


async def test_sealed_chunks_come_back_with_their_key_alone(prefix: str, tmp_path: Path) -> None:
    """Tokens and KV are not on the disk in the clear; with another key the chunk is missing, and new ones are good."""
    (tmp_path / "disk").mkdir()
    sequence = Sequence.make(1, 1)
    media = _cipher(tmp_path, KEY_A)
    async with running_storage(prefix, media) as cell:
        await cell.save(sequence, device=list(range(4)))
        same = await cell.fetch(sequence, list(range(4)))
        is_equal = cell.holds(sequence, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
        assert cell.device is not None
        stored = _file_of(tmp_path / "disk" / "chunks", sequence.names[0]).read_bytes()
        is_clear = cell.device.halves[0, 0, 0].tobytes() in stored or sequence.tokens in stored
    media.close()
    async with running_storage(prefix, _cipher(tmp_path, KEY_B)) as cell:
        other = await cell.fetch(sequence, list(range(4)))
        saved = await cell.save(sequence, device=list(range(4)))
        again = await cell.fetch(sequence, list(range(4)))
        counters = (await cell.inventory()).counters

    assert same.chunks == 1
    assert is_equal
    assert not is_clear
    assert (other.chunks, other.missing) == (0, sequence.names[0])
    assert counters["quarantined_wrong_key"] == 1
    assert (saved.chunks, again.chunks) == (sequence.names[0], 1)


async def test_no_key_is_no_reason_to_write_in_the_clear(prefix: str, tmp_path: Path) -> None:
    """Where keys are asked for, a tenant without one has nothing saved, and is told why."""
    (tmp_path / "disk").mkdir()
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, _cipher(tmp_path, KEY_A)) as cell:
        saved = await cell.save(sequence, device=list(range(4)), key_id="0" * 32)

    assert saved.chunks == b""
    assert "no encryption key" in saved.error


async def test_a_chunk_of_another_model_is_neither_listed_nor_served(prefix: str, tmp_path: Path) -> None:
    """Files of another geometry count in the quota alone; one that lies under a false name is found out."""
    other = KvGeometry(layers=1, kv_heads=2, head_dim=8, page_size=16, dtype="float16")
    sequence, mine = Sequence.make(1, 1, geometry=other), Sequence.make(1, 1)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(prefix, media, geometry=other) as cell:
        await cell.save(sequence, device=list(range(4)))
    media.close()
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(prefix, media) as cell:
        await cell.save(mine, device=list(range(4)))
        counters = (await cell.inventory()).counters
        listed = [event for event in cell.seen if isinstance(event, ChunksListed)]
        theirs = tmp_path / "chunks" / ChunkKey(NAMESPACE, geometry_id(other), sequence.names[0]).path
        ours = _file_of(tmp_path / "chunks" / NAMESPACE / geometry_id(GEOMETRY).hex(), mine.names[0])
        ours.write_bytes(theirs.with_name(f"{theirs.name}.chunk").read_bytes())
        fetched = await cell.fetch(mine, list(range(4)))

    assert counters["disk_chunks"] == 2
    assert listed == []
    assert (fetched.chunks, fetched.missing) == (0, mine.names[0])


async def test_a_directory_that_cannot_be_used_is_left_out(prefix: str, tmp_path: Path) -> None:
    """The storage joins without a disk, and answers saves and fetches with the reason."""
    (tmp_path / "file").write_text("not a directory")
    media = open_media(StorageConfig(disk_dir=(str(tmp_path / "file"),)))
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, media) as cell:
        saved = await cell.save(sequence, device=list(range(4)))
        fetched = await cell.fetch(sequence, list(range(4)))
        backup = await cell.backup(sequence, list(range(4)), list(range(4)))

        assert cell.joined is not None
        assert (cell.joined.disk_bytes, cell.joined.has_remote) == (0, False)
    assert (saved.chunks, fetched.chunks, fetched.is_over) == (b"", 0, True)
    assert "neither disk nor object store" in saved.error
    assert backup.ok


async def test_an_unreachable_object_store_costs_nothing_but_itself(prefix: str) -> None:
    """Saves are done on the disk, fetches end at what the disk has, with the reason."""
    disk, remote = _memory(), _memory()
    remote.put_error = remote.get_error = GONE
    sequence = Sequence.make(1, 3)
    async with running_storage(prefix, Media(disk, remote)) as cell:
        saved = await cell.save(sequence, device=list(range(8)), chunks=2)
        fetched = await cell.fetch(sequence, list(range(12)))

        assert cell.joined is not None
        assert cell.joined.has_remote
    assert (saved.chunks, saved.error) == (b"".join(sequence.names[:2]), "")
    assert (fetched.chunks, fetched.missing) == (2, sequence.names[2])
    assert "connection refused" in fetched.error


async def _uploads_done(cell: object, count: int) -> None:
    async with asyncio.timeout(20.0):
        while (await cell.inventory()).counters["chunks_uploaded"] < count:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


async def test_what_another_storage_saved_comes_from_the_object_store_and_stays(prefix: str) -> None:
    """A save is uploaded; a second storage fetches it remotely, writes it to its disk, and says so."""
    store = MemoryBackend(max_bytes=2**30)
    sequence = Sequence.make(1, 2)
    async with running_storage(prefix, Media(_memory(), GatedBackend(store))) as cell:
        await cell.save(sequence, device=list(range(8)))
        await _uploads_done(cell, 2)
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


async def test_without_a_disk_chunks_go_to_the_object_store(prefix: str) -> None:
    """A save to the store alone is answered without a chunk on the disk; a corrupt object is not served, but stays."""
    store = MemoryBackend(max_bytes=2**30)
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(None, store)) as cell:
        saved = await cell.save(sequence, device=list(range(4)))
        fetched = await cell.fetch(sequence, list(range(4)))
        (entry,) = list(store.entries())
        blob = memoryview(bytearray(entry.nbytes))
        store.get(entry.key, blob, timeout_s=1.0)
        blob[-1] ^= 1
        store.delete(entry.key, timeout_s=1.0)
        store.put(entry.key, blob, stripe=0, timeout_s=1.0)
        bad = await cell.fetch(sequence, list(range(4)))
        kept = [found.key for found in store.entries()]

    assert (saved.chunks, saved.error) == (b"", "")
    assert (fetched.chunks, fetched.remote_chunks) == (1, 1)
    assert bad.chunks == 0
    assert "wrong checksum" in bad.error
    assert kept == [entry.key]


async def test_a_host_page_is_read_before_a_later_order_writes_it(prefix: str) -> None:
    """A save that waits for a buffer still finds its host pages when later orders have got them."""
    disk = _memory()
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
    """The read that runs is waited for and thrown away; after the last event no host page changes."""
    disk = _memory()
    sequence = Sequence.make(1, 3)
    async with running_storage(prefix, Media(disk)) as cell:
        await cell.save(sequence, device=list(range(12)))
        disk.get_gate.clear()
        order = cell.fetch_order(sequence, list(range(12)))
        await cell.order(order)
        await asyncio.to_thread(disk.get_entered.wait, 20.0)
        await cell.order(CancelFetch(fetch_id=order.fetch_id))
        while (await cell.inventory()).last_plan < 5:
            await asyncio.sleep(0)
        disk.get_gate.set()
        fetched = await cell.fetched(order.fetch_id)

        assert (fetched.chunks, fetched.error) == (0, "cancelled")
        assert cell.host is not None
        assert not cell.host.identities.any()
        assert (await cell.fetch(sequence, list(range(12)))).chunks == 3


async def test_a_fetch_ends_at_its_deadline(prefix: str) -> None:
    """A disk that does not answer costs the time that the order allows, and its last event says so."""
    disk = _memory()
    sequence = Sequence.make(1, 2)
    async with running_storage(prefix, Media(disk)) as cell:
        await cell.save(sequence, device=list(range(8)))
        disk.get_gate.clear()
        disk.patience_s = 0.5
        late = await cell.fetch(sequence, list(range(8)), deadline_ms=30)
        none = await cell.fetch(sequence, list(range(8)), deadline_ms=0)
        disk.get_gate.set()
        again = await cell.fetch(sequence, list(range(8, 16)))

        assert (late.chunks, late.is_over, none.chunks) == (0, True, 0)
        assert (late.error, none.error) == ("its deadline passed", "its deadline passed")
        assert (late.missing, again.chunks) == (b"", 2)
        assert cell.host is not None
        assert not cell.host.identities[:8].any()


async def test_progress_is_told_a_few_times(prefix: str) -> None:
    """A long fetch sends at most eight events on the way, each of a longer prefix, then the last."""
    sequence = Sequence.make(1, 16)
    async with running_storage(prefix, Media(_memory())) as cell:
        await cell.save(sequence, device=list(range(64)))
        await cell.fetch(sequence, list(range(64)))
        events = [event for event in cell.seen if isinstance(event, ChunksFetched)]

    assert 2 <= len(events) <= 9
    counts = [event.chunks for event in events]
    assert counts == sorted(set(counts))
    assert [event.is_over for event in events] == [False] * (len(events) - 1) + [True]


async def test_saves_beyond_the_bound_are_refused(prefix: str) -> None:
    """One save too many is answered at once; those that wait are done."""
    disk = _memory()
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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
    ],
)
async def test_a_bad_save_is_answered(prefix: str, change: dict[str, object], reason: str) -> None:
    """No bad order ends the storage: it says what is wrong and goes on."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(_memory())) as cell:
        refused = await cell.save(sequence, device=list(range(4)), **change)
        saved = await cell.save(sequence, device=list(range(4)))

    assert reason in refused.error
    assert refused.chunks == b""
    assert saved.chunks == sequence.names[0]


async def test_a_bad_fetch_is_answered(prefix: str) -> None:
    """Pages that do not exist, or twice the same, are refused."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(_memory())) as cell:
        outside = await cell.fetch(sequence, [0, 1, 2, 64])
        twice = await cell.fetch(sequence, [0, 1, 2, 2])
        nowhere = await cell.fetch(sequence, list(range(4)))

    assert "host pages" in outside.error
    assert "twice" in twice.error
    assert (nowhere.chunks, nowhere.missing, nowhere.error) == (0, sequence.names[0], "")


async def test_a_detached_pool_is_not_read(prefix: str) -> None:
    """A save that waits when its worker's pool goes is answered with the reason; those that were read are done."""
    disk = _memory()
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


async def test_a_dropped_namespace_is_gone_everywhere(prefix: str) -> None:
    """Its chunks leave disk and object store, each is reported, and other namespaces stay."""
    mine, other = Sequence.make(1, 2), Sequence.make(1, 1, namespace=namespace_digest("other"))
    disk, store = MemoryBackend(max_bytes=2**30), MemoryBackend(max_bytes=2**30)
    async with running_storage(prefix, Media(disk, store)) as cell:
        await cell.save(mine, device=list(range(8)))
        await cell.save(other, device=list(range(4)))
        await _uploads_done(cell, 3)
        await cell.order(DropChunks(namespace=NAMESPACE))
        dropped = await cell.event(ChunksDropped)
        async with asyncio.timeout(20.0):
            while len(list(store.entries())) + len(list(disk.entries())) > 2:
                await asyncio.sleep(0.01)
        gone = await cell.fetch(mine, list(range(8)))
        kept = await cell.fetch(other, list(range(4)))

    assert sorted([dropped.chunks[:16], dropped.chunks[16:]]) == sorted(mine.names)
    assert (gone.chunks, kept.chunks) == (0, 1)


async def test_verifying_finds_what_rotted(prefix: str, tmp_path: Path) -> None:
    """A scrub walks the disk in pieces, quarantines what is bad, and tells operator and scheduler."""
    sequence = Sequence.make(1, 5)
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.save(sequence, device=list(range(20)))
        _flip(_file_of(tmp_path / "chunks", sequence.names[3]), BLOCK_BYTES + 17)
        pieces = [await cell.verify(VerifyChunks(max_chunks=2))]
        while pieces[-1].next_after:
            pieces.append(await cell.verify(VerifyChunks(after=pieces[-1].next_after, max_chunks=2)))
        dropped = await cell.event(ChunksDropped)
        counters = (await cell.inventory()).counters

    assert sum(piece.checked for piece in pieces) == 5
    assert len(pieces) >= 3
    (bad,) = [line for piece in pieces for line in piece.bad]
    assert bad.startswith(sequence.names[3].hex())
    assert "wrong checksum" in bad
    assert dropped.chunks == sequence.names[3]
    assert counters["disk_chunks"] == 4


async def test_a_stop_answers_what_was_ordered(prefix: str) -> None:
    """The chunk that is being written is finished, the others are given up, each save is answered before the end."""
    disk = _memory()
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


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_overlaps_what_is_served_is_right(prefix: str, tmp_path: Path, seed: int) -> None:
    """Random saves, fetches, cancels, drops, pins and bit rot over a small quota and few buffers: every chunk that is
    served is the right one, bit by bit, and what the events tell of the disk is in the end what it holds.
    """
    random = Random(seed)
    sequences = [Sequence.make(number, 4, namespace=namespace_digest(f"tenant-{number % 2}")) for number in range(12)]
    device = {sequence.names[0]: [random.randrange(64) for _ in range(16)] for sequence in sequences}
    store = MemoryBackend(max_bytes=2**30) if seed % 2 else None
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    media = Media(DiskBackend([str(directory) for directory in directories]), store)
    async with running_storage(
        prefix, media, disk_kv_bytes=2**20, staging_bytes=2**20, io_threads=3, max_saves=16
    ) as cell:
        filler = Sequence.make(99, 2**20 // BLOB_BYTES - 12)
        await cell.save(filler, device=[page % 64 for page in range(filler.pages)], value=1e9)
        bad = 0
        for _ in range(60):
            sequence = random.choice(sequences)
            pages = device[sequence.names[0]]
            match random.randrange(8):
                case 0 | 1 | 2:
                    first = random.choice([0, 0, 1, 3])
                    order = cell.save_order(
                        sequence, device=pages[first * 4 :], first=first, value=float(random.randrange(20))
                    )
                    await cell.order(order)
                    if random.random() < 0.7:
                        await _idle(cell)
                case 3 | 4:
                    fetched = await cell.fetch(sequence, list(range(16)))
                    bad += bool(fetched.error)
                    count = fetched.chunks * 4
                    assert cell.holds(sequence, list(range(count)), list(range(count)), pages[:count])
                case 5:
                    order = cell.fetch_order(sequence, list(range(20, 36)))
                    await cell.order(order)
                    await cell.order(CancelFetch(fetch_id=order.fetch_id))
                    fetched = await cell.fetched(order.fetch_id)
                    count = fetched.chunks * 4
                    assert cell.holds(sequence, list(range(count)), list(range(20, 20 + count)), pages[:count])
                case 6:
                    await cell.order(PinChunks(chunks=sequence.names[0], is_pinned=random.random() < 0.5))
                    if random.random() < 0.1:
                        await cell.order(DropChunks(namespace=sequence.namespace, tiers=("disk",)))
                case 7:
                    await _idle(cell)  # Nothing is being deleted now.
                    files = sorted(tmp_path.rglob("chunks/**/*.chunk"))
                    if files:
                        _flip(random.choice(files[:6] + files[-6:]), random.randrange(BLOB_BYTES))
        counters = await _idle(cell)
        await cell.stop()
        held = {entry.key.identity for entry in media.disk.entries()} if media.disk else set()
        told = _catalogue([*cell.seen, *await cell.rest()])

    assert told == held
    assert counters["disk_chunks"] == len(held)
    assert counters["disk_bytes"] <= 2**20


async def _idle(cell: StorageCell) -> dict[str, int]:
    """The counters once nothing is under way."""
    kinds = ("saves", "fetches", "removals", "uploads", "promotions", "drops")
    async with asyncio.timeout(30.0):
        while True:
            counters = (await cell.inventory()).counters
            if not any(counters.get(f"{kind}_outstanding") for kind in kinds):
                return counters
            await asyncio.sleep(0.01)


def _catalogue(events: list[Input]) -> set[bytes]:
    """What the scheduler would take the disk to hold."""
    held: set[bytes] = set()
    for event in events:
        match event:
            case ChunksSaved():
                held -= set(_split(event.dropped))
                held |= set(_split(event.chunks))
            case ChunksListed():
                held |= set(_split(event.chunks))
            case ChunksDropped():
                held -= set(_split(event.chunks))
            case ChunksFetched():
                held -= set(_split(event.missing))
            case _:
                pass
    return held


def _split(packed: bytes) -> list[bytes]:
    return [packed[start : start + 16] for start in range(0, len(packed), 16)]


async def test_a_killed_storage_is_warm_again(nats_server: NatsServer, prefix: str, tmp_path: Path) -> None:
    """As a process with a disk: it joins with its budget, and after SIGKILL the next one lists what was saved."""
    bus = await nats_bus.connect([nats_server.url], "scheduler")
    await bus.ensure_streams(StreamLimits(max_bytes=64 * 2**20))
    sequence = Sequence.make(1, 2)
    cell = StorageCell(bus, GEOMETRY)
    await cell.answer_standing()
    flags = ["--nats", nats_server.url, "--id", "s0", "--node", "n0", "--shm-prefix", prefix, "--host-kv-bytes", "4MiB"]
    flags += ["--disk-dir", str(tmp_path), "--disk-kv-bytes", "8MiB"]
    command = [sys.executable, "-m", "services.storage", *flags]
    first = await asyncio.create_subprocess_exec(*command)
    try:
        cell.joined = await cell.event(StorageJoined)
        await make_pools(cell, prefix)
        saved = await cell.save(sequence, device=list(range(8)))
    finally:
        first.kill()
        await first.wait()
    cell.begin_incarnation()
    second = await asyncio.create_subprocess_exec(*command)
    try:
        cell.joined = await cell.event(StorageJoined)
        await make_pools(cell, prefix)
        listed = await cell.event(ChunksListed)
        fetched = await cell.fetch(sequence, list(range(8)))
        is_equal = cell.holds(sequence, list(range(8)), list(range(8)), list(range(8)))
        second.terminate()
        await cell.event(StorageLeft)
        exit_code = await second.wait()
    finally:
        if second.returncode is None:
            second.kill()
        await bus.close()

    assert cell.joined.disk_bytes == 8 * 2**20
    assert saved.chunks == b"".join(sequence.names)
    assert sorted(_split(listed.chunks)) == sorted(sequence.names)
    assert (fetched.chunks, is_equal, exit_code) == (2, True, 0)


async def test_too_little_staging_leaves_the_tiers_out(prefix: str) -> None:
    """Chunks that do not fit in a buffer are neither saved nor fetched, with the reason; backups go on."""
    large = KvGeometry(layers=32, kv_heads=8, head_dim=32, page_size=64, dtype="float32")
    sequence = Sequence.make(1, 1, geometry=large)
    async with running_storage(prefix, Media(_memory()), geometry=large, staging_bytes=2**20) as cell:
        saved = await cell.save(sequence, device=[0])
        fetched = await cell.fetch(sequence, [0])
        backup = await cell.backup(sequence, [0], [0])

    assert "--staging-bytes" in saved.error
    assert "--staging-bytes" in fetched.error
    assert backup.ok


async def test_orders_before_the_pool_are_answered(prefix: str) -> None:
    """Without a host pool there is nothing to save from or to fetch to; the storage says so and goes on."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(_memory()), with_pools=False) as cell:
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
