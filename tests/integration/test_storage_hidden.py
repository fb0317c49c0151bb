"""Hidden states beside KV in a whole storage: they come back bit by bit, are kept and dropped with it, and
never taken for it.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from services.storage.backends.disk import DiskBackend
from services.storage.chunk_format import blob_nbytes
from services.storage.config import StorageConfig
from services.storage.media import Media, open_media
from shared.chunks import chunk_pages, geometry_id
from shared.messages.pools import HIDDEN, KvGeometry
from shared.messages.storage_events import ChunksDropped, ChunksListed
from shared.messages.storage_plans import DropChunks, PinChunks
from tests.chunk_makers import HIDDEN_GEOMETRIES
from tests.integration.storage_cell import BLOB_BYTES, NAMESPACE, Sequence, gated_memory
from tests.integration.storage_hidden_cell import HIDDEN_GEOMETRY, OTHER, running_with_hidden, told
from tests.memory_backend import MemoryBackend

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("geometry", HIDDEN_GEOMETRIES.values(), ids=HIDDEN_GEOMETRIES)
async def test_hidden_states_of_every_shape_come_back_bit_by_bit(
    prefix: str, tmp_path: Path, geometry: KvGeometry
) -> None:
    """What a worker sealed is written down, and fetched to other pages of the pool, sealed with the same checksums."""
    per_chunk = chunk_pages(geometry.page_size)
    chunks = min(2, 24 // per_chunk) or 1
    pages = [page for page in range(48) if page % 2][: chunks * per_chunk] if per_chunk < 48 else list(range(per_chunk))
    sequence = Sequence.make(1, chunks, geometry=geometry)
    budget = 2**20
    async with running_with_hidden(
        prefix, Media(DiskBackend([str(tmp_path)])), geometry=geometry, hidden_bytes=budget
    ) as state:
        assert state.cell.joined is not None
        assert state.cell.joined.hidden_bytes == budget
        written = state.write(sequence, pages)
        saved = await state.cell.save(sequence, host=pages, form=HIDDEN)
        state.wipe()
        into = pages[::-1]
        fetched = await state.cell.fetch(sequence, into, form=HIDDEN)
        counters = (await state.cell.inventory()).counters

        assert saved.chunks == b"".join(sequence.names)
        assert (saved.error, saved.nbytes) == ("", chunks * blob_nbytes(geometry))
        assert (fetched.chunks, fetched.disk_chunks, fetched.missing, fetched.error) == (chunks, chunks, b"", "")
        assert state.holds(sequence, into, written)
        assert (counters["hidden_chunks_saved"], counters["hidden_chunks_fetched"]) == (chunks, chunks)
        assert counters["hidden_pages_total"] == state.pool.handle.pages


async def test_kv_and_hidden_states_of_the_same_tokens_lie_side_by_side(prefix: str, tmp_path: Path) -> None:
    """Saving one is not saving the other, each comes back as what it is, and what is counted is counted together."""
    sequence = Sequence.make(1, 2)
    pages = list(range(8))
    async with running_with_hidden(prefix, Media(DiskBackend([str(tmp_path)]))) as state:
        cell = state.cell
        written = state.write(sequence, pages)
        await cell.save(sequence, device=pages)
        before = await cell.fetch(sequence, pages, form=HIDDEN)
        saved = await cell.save(sequence, host=pages, form=HIDDEN)
        state.wipe()
        of_kv = await cell.fetch(sequence, pages[::-1])
        of_hidden = await cell.fetch(sequence, [-1, -1, *pages[:6]], form=HIDDEN)
        counters = (await cell.inventory()).counters

        assert (before.chunks, before.missing) == (0, b"".join(sequence.names))
        assert saved.chunks == b"".join(sequence.names)
        assert (of_kv.chunks, of_hidden.chunks) == (2, 2)
        assert cell.holds(sequence, pages, pages[::-1], pages)
        assert state.holds(sequence, pages[:6], written[2:], first=2)
        assert (counters["disk_chunks"], counters["chunks_saved"], counters["hidden_chunks_saved"]) == (4, 4, 2)
        assert (counters["chunks_fetched_disk"], counters["hidden_chunks_fetched"]) == (4, 2)


async def test_a_restarted_storage_lists_hidden_states_once_there_is_a_pool_for_it(prefix: str, tmp_path: Path) -> None:
    """The next incarnation tells of each form after its pool, and serves it; drops take both, and say so."""
    mine, other = Sequence.make(1, 3), Sequence.make(2, 1, namespace=OTHER)
    pages = list(range(12))
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_with_hidden(prefix, media) as state:
        written = state.write(mine, pages)
        await state.cell.save(mine, host=pages, form=HIDDEN)
        await state.cell.save(mine, device=pages[:4], chunks=1)
        state.write(other, [20, 21, 22, 23])
        await state.cell.save(other, host=[20, 21, 22, 23], form=HIDDEN)
    media.close()

    async with running_with_hidden(prefix, Media(DiskBackend([str(tmp_path)]), disk_bytes_per_s=2e9)) as state:
        joined = state.cell.joined
        listed = await told(state.cell, ChunksListed, 5)
        fetched = await state.cell.fetch(mine, pages, form=HIDDEN)
        is_equal = state.holds(mine, pages, written)
        await state.cell.order(DropChunks(namespace=NAMESPACE))
        dropped = await told(state.cell, ChunksDropped, 4)
        gone = await state.cell.fetch(mine, pages, form=HIDDEN)
        kept = await state.cell.fetch(other, pages[:4], form=HIDDEN)

    assert joined is not None
    assert joined.shapes == geometry_id(HIDDEN_GEOMETRY) + geometry_id(HIDDEN_GEOMETRY.as_kv)
    assert joined.disk_measured_bytes_per_s == 2e9
    assert listed == {"kv": [mine.names[0]], HIDDEN: sorted(mine.names + other.names)}
    assert (fetched.disk_chunks, is_equal) == (3, True)
    assert dropped == {"kv": [mine.names[0]], HIDDEN: sorted(mine.names)}
    assert (gone.chunks, kept.chunks) == (0, 1)


def _sealing(tmp_path: Path, key: bytes) -> Media:
    keys = tmp_path / f"keys-{key.hex()[:2]}.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'default = "{base64.b64encode(key).decode()}"\n')
    return open_media(StorageConfig(disk_dir=(str(tmp_path / "disk"),), keys=str(keys)))


async def test_sealed_hidden_states_come_back_with_their_key_alone(prefix: str, tmp_path: Path) -> None:
    """With keys nothing of it lies in the clear, and with another key it is missing."""
    (tmp_path / "disk").mkdir()
    sequence = Sequence.make(1, 1)
    pages = [0, 1, 2, 3]
    media = _sealing(tmp_path, b"a" * 32)
    async with running_with_hidden(prefix, media) as state:
        written = state.write(sequence, pages)
        saved = await state.cell.save(sequence, host=pages, form=HIDDEN)
        state.wipe()
        fetched = await state.cell.fetch(sequence, [4, 5, 6, 7], form=HIDDEN)
        is_equal = state.holds(sequence, [4, 5, 6, 7], written)
    media.close()
    (file,) = (tmp_path / "disk").rglob("*.chunk")
    blob = file.read_bytes()
    async with running_with_hidden(prefix, _sealing(tmp_path, b"b" * 32)) as state:
        other = await state.cell.fetch(sequence, pages, form=HIDDEN)

    assert (saved.chunks, fetched.chunks, is_equal) == (sequence.names[0], 1, True)
    assert written[0].tobytes()[:64] not in blob
    assert sequence.tokens[:64] not in blob
    assert (other.chunks, other.missing) == (0, sequence.names[0])


async def test_hidden_states_that_another_storage_saved_come_from_the_object_store_and_stay(prefix: str) -> None:
    """Hidden states are uploaded beside KV, fetched remotely by a second storage, and written to its disk as such."""
    store = MemoryBackend(max_bytes=2**30)
    sequence = Sequence.make(1, 2)
    pages = list(range(8))
    async with running_with_hidden(prefix, Media(gated_memory(), store)) as state:
        written = state.write(sequence, pages)
        await state.cell.save(sequence, host=pages, form=HIDDEN)
        await state.cell.save(sequence, device=pages)
        await state.cell.uploaded(4)
    async with running_with_hidden(prefix, Media(gated_memory(), store)) as state:
        far = await state.cell.fetch(sequence, pages, form=HIDDEN)
        listed = await told(state.cell, ChunksListed, 2)
        state.wipe()
        near = await state.cell.fetch(sequence, pages, form=HIDDEN)

        assert (far.remote_chunks, near.disk_chunks) == (2, 2)
        assert listed == {"kv": [], HIDDEN: sorted(sequence.names)}
        assert state.holds(sequence, pages, written)


async def test_one_quota_is_kept_over_both_forms(prefix: str) -> None:
    """Hot hidden states drive out cold KV; what went is reported under its form; a pin keeps both forms of a prefix."""
    pinned, cold, hot = Sequence.make(1, 1), Sequence.make(2, 4), Sequence.make(3, 2)
    quota = 2**20
    each, pages = blob_nbytes(HIDDEN_GEOMETRY), list(range(8))
    filler = Sequence.make(4, (quota - 5 * BLOB_BYTES - each) // BLOB_BYTES, namespace=OTHER)
    async with running_with_hidden(prefix, Media(gated_memory()), disk_kv_bytes=quota) as state:
        cell = state.cell
        await cell.order(PinChunks(chunks=b"".join(pinned.names)))
        state.write(pinned, [0, 1, 2, 3])
        await cell.save(pinned, host=[0, 1, 2, 3], form=HIDDEN)
        await cell.save(pinned, device=[0, 1, 2, 3])
        await cell.save(cold, device=list(range(16)))
        await cell.save(filler, device=[page % 64 for page in range(filler.pages)], value=1000.0)
        state.write(hot, pages)
        saved = await cell.save(hot, host=pages, form=HIDDEN, value=1000.0)
        dropped = await told(cell, ChunksDropped, 4)
        counters = (await cell.inventory()).counters
        kept = [await cell.fetch(pinned, [20, 21, 22, 23], form=form) for form in ("kv", HIDDEN)]

    assert (saved.chunks, saved.dropped, saved.error) == (b"".join(hot.names), b"", "")
    assert dropped == {"kv": sorted(cold.names), HIDDEN: []}
    assert counters["disk_bytes"] <= quota
    assert [fetched.chunks for fetched in kept] == [1, 1]
