"""Sparse copies in a whole storage: made behind saves, told of, dropped, found again, and read."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from services.storage.backends.disk import DiskBackend
from services.storage.chunk_format import blob_nbytes
from services.storage.config import StorageConfig
from services.storage.media import Media, open_media
from services.storage.shell import StorageShell
from services.storage.sparse.layout import SparseLayout
from shared.chunks import chunk_tokens
from shared.ids import namespace_digest
from shared.messages.base import pack_int32
from shared.messages.pools import HIDDEN, KvGeometry
from shared.messages.sparse_reads import ReadSparse
from shared.messages.status import VerifyChunks
from shared.messages.storage_events import ChunksDropped, ChunksListed
from shared.messages.storage_plans import DropChunks, PinChunks
from tests.integration import storage_cell
from tests.integration.storage_cell import GEOMETRY, NAMESPACE, E, Sequence, StorageCell, make_pools, running_storage
from tests.integration.storage_hidden_cell import HIDDEN_GEOMETRY, running_with_hidden
from tests.memory_backend import MemoryBackend

LAYOUT = SparseLayout.of(GEOMETRY)
OTHER = namespace_digest("other")


@pytest.fixture
def shells(monkeypatch: pytest.MonkeyPatch) -> list[StorageShell]:
    """The storages that a test started."""
    started: list[StorageShell] = []

    class Noted(StorageShell):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(storage_cell, "StorageShell", Noted)
    return started


async def told(cell: StorageCell, kind: type[E], count: int) -> dict[str, list[bytes]]:
    """The chunks that the next events of a kind name, by form and sorted, until there are ``count``."""
    assert kind in (ChunksListed, ChunksDropped)
    names: dict[str, list[bytes]] = {"kv": [], HIDDEN: [], "sparse": []}
    while sum(len(of_form) for of_form in names.values()) < count:
        event = await cell.event(kind)
        chunks: bytes = event.chunks  # type: ignore[attr-defined]
        names[event.form] += [chunks[at : at + 16] for at in range(0, len(chunks), 16)]  # type: ignore[attr-defined]
    return {form: sorted(of_form) for form, of_form in names.items()}


def read_all(sequence: Sequence, chunks: int, layer: int, **change: object) -> ReadSparse:
    """A read of K and V of every token of the first chunks."""
    tokens = chunks * chunk_tokens(GEOMETRY.page_size)
    fields: dict[str, object] = {
        "namespace": sequence.namespace,
        "depth": 0,
        "chunks": b"".join(sequence.names[:chunks]),
        "layer": layer,
        "part": "kv",
        "buffer": "b",
        "offset": 0,
        "nbytes": 2 * tokens * LAYOUT.row_bytes,
        "tokens": pack_int32(range(tokens)),
    }
    return ReadSparse(**(fields | change))  # type: ignore[arg-type]


async def read(shell: StorageShell, call: ReadSparse) -> bytes:
    reader = shell._tiers.sparse
    assert reader is not None
    into = memoryview(bytearray(call.nbytes))
    await reader.read(call, into)
    return bytes(into)


def of_device(cell: StorageCell, pages: list[int], layer: int) -> bytes:
    """K and V of one layer of these pages of the worker's pool, [2, tokens, row]."""
    assert cell.device is not None
    return np.ascontiguousarray(cell.device.halves[layer][:, pages]).tobytes()


async def test_what_is_saved_can_be_read_in_part(shm_prefix: str, tmp_path: Path, shells: list[StorageShell]) -> None:
    """The storage says that it keeps copies, tells of each once it is there, and reads what the worker computed."""
    sequence, pages = Sequence.make(1, 3), list(range(12))
    async with running_storage(shm_prefix, Media(DiskBackend([str(tmp_path)])), sparse=True) as cell:
        assert cell.joined is not None
        assert cell.joined.keeps_sparse
        saved = await cell.save(sequence, device=pages)
        listed = await told(cell, ChunksListed, 3)
        counters = (await cell.inventory()).counters
        found = [await read(shells[0], read_all(sequence, 3, layer)) for layer in range(GEOMETRY.layers)]

        assert (saved.error, saved.chunks) == ("", b"".join(sequence.names))
        assert listed == {"kv": [], HIDDEN: [], "sparse": sorted(sequence.names)}
        assert found == [of_device(cell, pages, layer) for layer in range(GEOMETRY.layers)]
        assert (counters["sparse_copies_written"], counters["disk_chunks"]) == (3, 6)
        assert counters["disk_bytes"] == 3 * (blob_nbytes(GEOMETRY) + LAYOUT.blob_bytes(is_sealed=False))


async def test_without_the_setting_there_are_no_copies(
    shm_prefix: str, tmp_path: Path, shells: list[StorageShell]
) -> None:
    """Nor without a disk; copies of an earlier start stay in the quota and are not told of."""
    sequence = Sequence.make(1, 2)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(shm_prefix, media, sparse=True) as cell:
        await cell.save(sequence, device=list(range(8)))
        await told(cell, ChunksListed, 2)
    media.close()
    async with running_storage(shm_prefix, Media(DiskBackend([str(tmp_path)]))) as cell:
        listed = await told(cell, ChunksListed, 2)
        counters = (await cell.inventory()).counters

        assert cell.joined is not None
        assert not cell.joined.keeps_sparse
        assert shells[1]._tiers.sparse is None
        assert (listed["kv"], listed["sparse"]) == (sorted(sequence.names), [])
        assert counters["disk_chunks"] == 4
    async with running_storage(shm_prefix, Media(None, MemoryBackend(max_bytes=2**30)), sparse=True) as cell:
        assert cell.joined is not None
        assert not cell.joined.keeps_sparse


async def test_without_workers_that_read_parts_there_are_no_copies(
    shm_prefix: str, tmp_path: Path, shells: list[StorageShell]
) -> None:
    """The scheduler says so with the order for the pool; nothing is missing then."""
    sequence = Sequence.make(1, 2)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(shm_prefix, media, with_pools=False, sparse=True) as cell:
        await make_pools(cell, shm_prefix, is_read_in_part=False)

        await cell.save(sequence, device=list(range(8)))

        assert (await cell.inventory()).counters["disk_chunks"] == 2
        assert shells[0]._tiers.sparse is None
        assert list(shells[0]._tiers.faults()) == []


async def test_an_older_chunk_gets_its_copy_when_it_is_read(
    shm_prefix: str, tmp_path: Path, shells: list[StorageShell]
) -> None:
    """What was saved before the setting was on; once, however often it is read."""
    sequence, pages = Sequence.make(1, 2), list(range(8))
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(shm_prefix, media) as cell:
        await cell.save(sequence, device=pages)
        expected = [of_device(cell, pages, layer) for layer in range(GEOMETRY.layers)]
    media.close()
    async with running_storage(shm_prefix, Media(DiskBackend([str(tmp_path)])), sparse=True) as cell:
        await told(cell, ChunksListed, 2)
        await cell.fetch(sequence, host=pages)
        listed = await told(cell, ChunksListed, 2)
        found = [await read(shells[1], read_all(sequence, 2, layer)) for layer in range(GEOMETRY.layers)]
        await cell.fetch(sequence, host=pages)
        counters = (await cell.inventory()).counters

    assert listed == {"kv": [], HIDDEN: [], "sparse": sorted(sequence.names)}
    assert found == expected
    assert counters["sparse_copies_written"] == 2


async def test_a_restarted_storage_lists_copies_and_drops_them_with_their_chunks(
    shm_prefix: str, tmp_path: Path, shells: list[StorageShell]
) -> None:
    """Each form by its name; a dropped namespace takes its copies with it, and others stay."""
    mine, other = Sequence.make(1, 2), Sequence.make(2, 1, namespace=OTHER)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(shm_prefix, media, sparse=True) as cell:
        await cell.save(mine, device=list(range(8)))
        await cell.save(other, device=list(range(8, 12)))
        await told(cell, ChunksListed, 3)
        expected = of_device(cell, [8, 9, 10, 11], 1)
    media.close()

    async with running_storage(shm_prefix, Media(DiskBackend([str(tmp_path)])), sparse=True) as cell:
        listed = await told(cell, ChunksListed, 6)
        await cell.order(DropChunks(namespace=NAMESPACE))
        dropped = await told(cell, ChunksDropped, 4)
        found = await read(shells[1], read_all(other, 1, 1))

    assert listed == {"kv": sorted(mine.names + other.names), HIDDEN: [], "sparse": sorted(mine.names + other.names)}
    assert dropped == {"kv": sorted(mine.names), HIDDEN: [], "sparse": sorted(mine.names)}
    assert found == expected


async def test_copies_share_the_quota_and_go_first_when_they_are_worth_least(shm_prefix: str) -> None:
    """What had to make room is told of under its form; pins keep copies as they keep chunks."""
    pinned, cold = Sequence.make(1, 1), Sequence.make(2, 2)
    both = blob_nbytes(GEOMETRY) + LAYOUT.blob_bytes(is_sealed=False)
    quota = 2**20
    filler = Sequence.make(3, (quota - 2 * both) // both, namespace=OTHER)
    async with running_storage(
        shm_prefix, Media(MemoryBackend(max_bytes=2**30)), sparse=True, disk_kv_bytes=quota
    ) as cell:
        await cell.order(PinChunks(chunks=b"".join(pinned.names)))
        await cell.save(pinned, device=[0, 1, 2, 3])
        await cell.save(cold, device=list(range(8)))
        await told(cell, ChunksListed, 3)
        for first in range(0, len(filler.names), 8):
            count = min(8, len(filler.names) - first)
            await cell.save(filler, device=list(range(4 * count)), first=first, chunks=count, value=1e6)
            await told(cell, ChunksListed, count)
        counters = (await cell.inventory()).counters
        gone = [event for event in cell.seen if isinstance(event, ChunksDropped)]

    forms = {event.form for event in gone}
    names = b"".join(event.chunks for event in gone)
    assert counters["disk_bytes"] <= quota
    assert "sparse" in forms
    assert pinned.names[0] not in [names[at : at + 16] for at in range(0, len(names), 16)]


async def test_hidden_states_get_no_copies(shm_prefix: str, tmp_path: Path) -> None:
    """Only KV can be chosen from."""
    sequence, pages = Sequence.make(1, 1), [0, 1, 2, 3]
    async with running_with_hidden(
        shm_prefix, Media(DiskBackend([str(tmp_path)])), geometry=HIDDEN_GEOMETRY, sparse=True
    ) as state:
        state.write(sequence, pages)
        await state.cell.save(sequence, host=pages, form=HIDDEN)
        counters = (await state.cell.inventory()).counters

    assert (counters["disk_chunks"], counters["sparse_copies_written"], counters["sparse_copies_left_out"]) == (1, 0, 0)


async def test_a_promoted_chunk_gets_its_copy(shm_prefix: str, shells: list[StorageShell]) -> None:
    """What comes from the object store to the disk can be read in part from then on; the store has no copies."""
    store = MemoryBackend(max_bytes=2**30)
    sequence, pages = Sequence.make(1, 2), list(range(8))
    async with running_storage(shm_prefix, Media(MemoryBackend(max_bytes=2**30), store), sparse=True) as cell:
        await cell.save(sequence, device=pages)
        expected = of_device(cell, pages, 0)
        await told(cell, ChunksListed, 2)
        async with asyncio.timeout(20.0):
            while (await cell.inventory()).counters["chunks_uploaded"] < 2:
                await asyncio.sleep(0)
    assert len(list(store.entries())) == 2
    async with running_storage(shm_prefix, Media(MemoryBackend(max_bytes=2**30), store), sparse=True) as cell:
        fetched = await cell.fetch(sequence, pages)
        listed = await told(cell, ChunksListed, 4)

        assert fetched.remote_chunks == 2
        assert listed == {"kv": sorted(sequence.names), HIDDEN: [], "sparse": sorted(sequence.names)}
        assert await read(shells[1], read_all(sequence, 2, 0)) == expected


async def test_the_scrubber_looks_at_copies_too(shm_prefix: str, tmp_path: Path) -> None:
    """A damaged copy is reported and gone; its chunk of KV is not touched by that."""
    sequence = Sequence.make(1, 1)
    async with running_storage(shm_prefix, Media(DiskBackend([str(tmp_path)])), sparse=True) as cell:
        await cell.save(sequence, device=[0, 1, 2, 3])
        await told(cell, ChunksListed, 1)
        sound = await cell.verify(VerifyChunks())
        (file,) = (tmp_path / "chunks" / NAMESPACE / LAYOUT.shape.hex()).rglob("*.chunk")
        storage_cell.flip_byte(file, LAYOUT.unit_at(1, LAYOUT.probe_heads, is_sealed=False)[0] + 5)
        bad = await cell.verify(VerifyChunks())
        dropped = await told(cell, ChunksDropped, 1)
        fetched = await cell.fetch(sequence, [0, 1, 2, 3])

    assert (sound.checked, sound.bad) == (2, ())
    assert (bad.checked, len(bad.bad)) == (2, 1)
    assert dropped == {"kv": [], HIDDEN: [], "sparse": sequence.names}
    assert fetched.disk_chunks == 1


async def test_with_keys_copies_are_sealed(shm_prefix: str, tmp_path: Path, shells: list[StorageShell]) -> None:
    """Nothing of the KV lies in the clear, and who has the key reads it in part."""
    (tmp_path / "disk").mkdir()
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'default = "{base64.b64encode(b"a" * 32).decode()}"\n')
    media = open_media(StorageConfig(disk_dir=(str(tmp_path / "disk"),), keys=str(keys)))
    sequence, pages = Sequence.make(1, 1), [0, 1, 2, 3]
    async with running_storage(shm_prefix, media, sparse=True) as cell:
        await cell.save(sequence, device=pages)
        await told(cell, ChunksListed, 1)
        expected = of_device(cell, pages, 1)
        found = await read(shells[0], read_all(sequence, 1, 1))
    media.close()
    (file,) = (tmp_path / "disk" / "chunks" / NAMESPACE / LAYOUT.shape.hex()).rglob("*.chunk")

    assert found == expected
    assert expected[: LAYOUT.row_bytes] not in file.read_bytes()


async def test_a_storage_without_memory_for_copies_serves_without_them(
    shm_prefix: str, tmp_path: Path, shells: list[StorageShell]
) -> None:
    """One chunk of KV fits in the memory for chunks on their way, its copy does not."""
    geometry = KvGeometry(layers=16, kv_heads=8, head_dim=64, page_size=16, dtype="float16")
    budget = blob_nbytes(geometry)
    sequence = Sequence.make(1, 1, geometry=geometry)
    assert SparseLayout.of(geometry).blob_bytes(is_sealed=True) > budget
    async with running_storage(
        shm_prefix, Media(DiskBackend([str(tmp_path)])), geometry=geometry, sparse=True, staging_bytes=budget
    ) as cell:
        saved = await cell.save(sequence, device=[0, 1, 2, 3])

        assert (saved.error, saved.chunks) == ("", sequence.names[0])
        assert shells[0]._tiers.sparse is None
