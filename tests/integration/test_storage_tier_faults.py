"""Whatever goes wrong below host memory, no wrong KV comes back, and the storage goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.storage import tier_watch
from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.chunk_names import ChunkNames
from services.storage.cipher import open_cipher
from services.storage.config import StorageConfig
from services.storage.media import Media, open_media
from shared import lifecycle, subjects
from shared.bus.protocol import Delivery
from shared.chunks import geometry_id
from shared.codec import decode
from shared.messages.pools import KvGeometry
from shared.messages.status import Heartbeat
from shared.messages.storage_events import ChunksListed
from tests.integration.storage_cell import (
    BLOB_BYTES,
    FULL,
    GEOMETRY,
    GONE,
    NAMESPACE,
    TIMEOUT_S,
    Sequence,
    flip_byte,
    gated_memory,
    running_storage,
)
from tests.memory_backend import MemoryBackend

pytestmark = pytest.mark.integration

KEYS = 'default = "{key}"\n'
KEY_A = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="
KEY_B = "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkI="


def _file_of(directory: Path, name: bytes) -> Path:
    (file,) = directory.rglob(f"{name.hex()}.chunk")
    return file


def _cipher(tmp_path: Path, key: str) -> Media:
    file = tmp_path / f"{key[:4]}.toml"
    file.write_text(KEYS.format(key=key))
    file.chmod(0o600)
    cipher = open_cipher(StorageConfig(keys=str(file)), environ={})
    names = ChunkNames(cipher)
    return Media(DiskBackend([str(tmp_path / "disk")], names=names), None, cipher, names)


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
    async with running_storage(prefix, Media(gated_memory())) as cell:
        await cell.backup(sequence, list(range(8)), list(range(8)))
        await cell.backup(other, [9], [5])
        saved = await cell.save(sequence, host=list(range(8)))

    assert saved.chunks == sequence.names[0]
    assert "replaced" in saved.error


async def test_damaged_host_memory_is_not_saved(prefix: str) -> None:
    """A bit that flipped in host memory does not get to the disk."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory())) as cell:
        await cell.backup(sequence, list(range(4)), list(range(4)))
        assert cell.host is not None
        cell.host.pages[2, 1, 0] ^= 1
        saved = await cell.save(sequence, host=list(range(4)))

    assert saved.chunks == b""
    assert "damaged" in saved.error


@pytest.mark.parametrize("offset", [8, 300, BLOCK_BYTES - 1, BLOCK_BYTES + 5000], ids=["version", "gap", "table", "KV"])
async def test_a_corrupt_chunk_is_missing_and_nothing_behind_it_is_served(
    prefix: str, tmp_path: Path, offset: int
) -> None:
    """One wrong bit in a file: what is before it is served, the chunk is gone and counted, the rest is not served.
    Saved again, it is good.
    """
    sequence = Sequence.make(1, 3)
    async with running_storage(prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        await cell.save(sequence, device=list(range(12)))
        flip_byte(_file_of(tmp_path / "chunks", sequence.names[1]), offset)

        fetched = await cell.fetch(sequence, list(range(12)))
        again = await cell.fetch(sequence, list(range(12)))
        counters = (await cell.inventory()).counters

        assert (fetched.chunks, fetched.is_over, fetched.missing) == (1, True, sequence.names[1])
        assert fetched.error
        assert cell.holds(sequence, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
        assert cell.host is not None
        assert not cell.host.identities[4:12].any()
        saved = await cell.save(sequence, device=list(range(12)))
        good = await cell.fetch(sequence, list(range(12)))
        assert (saved.chunks, good.chunks) == (b"".join(sequence.names), 3)
        assert cell.holds(sequence, list(range(12)), list(range(12)), list(range(12)))
        assert again.missing == sequence.names[1]
        assert counters["chunks_quarantined"] == 1
        assert counters["disk_chunks"] == 2


async def test_a_full_disk_ends_saves_but_nothing_else(prefix: str) -> None:
    """The disk says it is full although the quota has room: saves fail, without asking it each time; fetches go on."""
    first, second, third = (Sequence.make(seed, 1) for seed in (1, 2, 3))
    disk = gated_memory()
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


async def test_sealed_chunks_come_back_with_their_key_alone(prefix: str, tmp_path: Path) -> None:
    """Tokens, KV and digests of tokens are not on the disk in the clear; with another key the chunk is missing, and new
    ones are good.
    """
    (tmp_path / "disk").mkdir()
    sequence = Sequence.make(1, 1)
    media = _cipher(tmp_path, KEY_A)
    async with running_storage(prefix, media) as cell:
        await cell.save(sequence, device=list(range(4)))
        same = await cell.fetch(sequence, list(range(4)))
        is_equal = cell.holds(sequence, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
        assert cell.device is not None
        (file,) = (tmp_path / "disk" / "chunks").rglob("*.chunk")
        stored = file.read_bytes() + str(file).encode()
        clear = (cell.device.halves[0, 0, 0].tobytes(), sequence.tokens, sequence.names[0])
        is_clear = any(part in stored for part in (*clear, sequence.names[0].hex().encode()))
    media.close()
    async with running_storage(prefix, _cipher(tmp_path, KEY_B)) as cell:
        await cell.event(ChunksListed)  # Until then the disk does not know of the chunk.
        other = await cell.fetch(sequence, list(range(4)))
        saved = await cell.save(sequence, device=list(range(4)))
        again = await cell.fetch(sequence, list(range(4)))
        counters = (await cell.inventory()).counters

    assert same.chunks == 1
    assert is_equal
    assert not is_clear
    assert (other.chunks, other.missing) == (0, sequence.names[0])
    assert counters["disk_chunks"] == 2  # The old one counts until it is evicted.
    assert (saved.chunks, again.chunks) == (sequence.names[0], 1)


async def test_only_sealed_chunks_reach_a_store_that_is_added(prefix: str, tmp_path: Path) -> None:
    """One that an earlier start left on the disk in the clear stays there; sealed ones come back with their key."""
    (tmp_path / "disk").mkdir()
    clear, sealed = Sequence.make(1, 1), Sequence.make(2, 1)
    media = Media(DiskBackend([str(tmp_path / "disk")]))
    async with running_storage(prefix, media) as cell:
        await cell.save(clear, device=list(range(4)))
    media.close()
    media = _cipher(tmp_path, KEY_A)
    async with running_storage(prefix, media) as cell:
        await cell.save(sealed, device=list(range(4)))
    media.close()
    store = MemoryBackend(max_bytes=2**30)
    media = _cipher(tmp_path, KEY_A)
    async with running_storage(prefix, Media(media.disk, store, media.cipher)) as cell:
        await cell.uploaded(1)
        counters = await cell.idle()
    async with running_storage(prefix, Media(None, store, media.cipher)) as cell:
        fetched = await cell.fetch(sealed, list(range(4)))

    assert [entry.key.identity for entry in store.entries()] == [sealed.names[0]]
    assert (counters["reconcile_found"], counters["uploads_failed"], counters["uploads_left_out"]) == (2, 0, 0)
    assert fetched.remote_chunks == 1


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
        async with asyncio.timeout(TIMEOUT_S):
            while (await cell.inventory()).counters["disk_chunks"] < 2:
                await asyncio.sleep(0.01)
        theirs = tmp_path / "chunks" / ChunkKey(NAMESPACE, geometry_id(other), sequence.names[0]).path
        ours = _file_of(tmp_path / "chunks" / NAMESPACE / geometry_id(GEOMETRY).hex(), mine.names[0])
        ours.write_bytes(theirs.with_name(f"{theirs.name}.chunk").read_bytes())
        fetched = await cell.fetch(mine, list(range(4)))
        events = [*cell.seen, *await cell.rest()]

    # The listing may come after the save, and names what was saved then too.
    listed = b"".join(event.chunks for event in events if isinstance(event, ChunksListed))
    assert listed in (b"", mine.names[0])
    assert (fetched.chunks, fetched.missing) == (0, mine.names[0])


async def test_a_directory_that_another_storage_has_is_used_once_it_is_free(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then saves fail with the reason, which heartbeats tell; then what it holds is listed, and is fetched."""
    monkeypatch.setattr(tier_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lifecycle, "HEARTBEAT_S", 0.01)
    sequence = Sequence.make(1, 1)
    other = DiskBackend([str(tmp_path)])
    async with running_storage(prefix, Media(other)) as cell:
        await cell.save(sequence, device=list(range(4)))
    heard: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def hear(delivery: Delivery) -> None:
        heard.put_nowait(decode(delivery.data, Heartbeat))

    async def told(is_degraded: bool) -> Heartbeat:
        async with asyncio.timeout(TIMEOUT_S):
            while bool((heartbeat := await heard.get()).degraded) != is_degraded:
                pass
        return heartbeat

    media = open_media(StorageConfig(disk_dir=(str(tmp_path),), disk_kv_bytes=2**20))
    async with running_storage(prefix, media, disk_dir=(str(tmp_path),), disk_kv_bytes=2**20) as cell:
        await cell.bus.subscribe(subjects.HEARTBEATS, hear)
        degraded = (await told(True)).degraded
        saved = await cell.save(sequence, device=list(range(4)))
        other.close()
        listed = await cell.event(ChunksListed)
        fetched = await cell.fetch(sequence, list(range(4)))
        await told(False)

    assert [(each.component, each.what, each.setting) for each in degraded] == [("s0", "disk", "--disk-dir")]
    assert "in use by process" in degraded[0].reason
    assert "in use by process" in saved.error
    assert listed.chunks == b"".join(sequence.names)
    assert (fetched.chunks, fetched.disk_chunks, fetched.error) == (1, 1, "")


async def test_an_unreachable_object_store_costs_nothing_but_itself(prefix: str) -> None:
    """Saves are done on the disk, fetches end at what the disk has, with the reason."""
    disk, remote = gated_memory(), gated_memory()
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


async def test_too_little_staging_leaves_the_tiers_out(prefix: str) -> None:
    """Chunks that do not fit in a buffer are neither saved nor fetched, with the reason; backups go on."""
    large = KvGeometry(layers=32, kv_heads=8, head_dim=32, page_size=64, dtype="float32")
    sequence = Sequence.make(1, 1, geometry=large)
    async with running_storage(prefix, Media(gated_memory()), geometry=large, staging_bytes=2**20) as cell:
        saved = await cell.save(sequence, device=[0])
        fetched = await cell.fetch(sequence, [0])
        backup = await cell.backup(sequence, [0], [0])

    assert "--staging-bytes" in saved.error
    assert "--staging-bytes" in fetched.error
    assert backup.ok
