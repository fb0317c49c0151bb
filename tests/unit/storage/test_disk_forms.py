"""What the cell is told of the forms that a disk holds, and what of them is not read."""

from __future__ import annotations

from msgspec import structs

from services.storage.backends import BLOCK_BYTES, ChunkEntry, ChunkKey
from services.storage.core.chunk_index import ChunkIndex
from services.storage.disk_forms import UnreadForms, shapes_of
from shared.chunks import geometry_id
from shared.hidden_forms import MOST_SHAPES
from shared.messages.pools import KvGeometry
from tests.memory_backend import MemoryBackend

MHA = KvGeometry(layers=3, kv_heads=4, head_dim=8, page_size=16, dtype="float32")
FIRST = structs.replace(MHA, hidden=32, absent=1, from_hidden=2)
SECOND = structs.replace(MHA, hidden=32, from_hidden=3)


def keys(shape: bytes, count: int) -> list[ChunkKey]:
    return [ChunkKey("aa" * 16, shape, index.to_bytes(16, "little")) for index in range(count)]


def disk_of(**counts: int) -> MemoryBackend:
    """A disk with so many chunks of each geometry, given by eight letters."""
    disk = MemoryBackend(max_bytes=2**30)
    for shape, count in counts.items():
        for key in keys(shape.encode(), count):
            disk.put(key, memoryview(bytes(BLOCK_BYTES)), stripe=0, timeout_s=1.0)
    return disk


def test_geometries_are_announced_by_their_chunks() -> None:
    """That of most chunks first; of no disk, and of one that cannot tell, nothing."""
    assert shapes_of(disk_of(rareform=1, mostform=3, someform=2)) == b"mostformsomeformrareform"
    assert shapes_of(None) == shapes_of(MemoryBackend(max_bytes=1)) == b""


def test_an_announcement_is_bounded() -> None:
    """What there is least of is left out."""
    many = {f"{index:08}": 1 for index in range(MOST_SHAPES)}

    found = shapes_of(disk_of(**many, mostform=2))

    assert len(found) == 8 * MOST_SHAPES
    assert found.startswith(b"mostform00000000")


def test_what_the_pool_is_not_of_is_told_until_it_is_gone() -> None:
    """A chunk of another form is never read; the setting that would have it read is named."""
    index = ChunkIndex(2**30)
    unread = UnreadForms(FIRST, geometry_id(FIRST) + geometry_id(SECOND) + geometry_id(MHA))
    kept = [*keys(geometry_id(FIRST), 2), *keys(geometry_id(SECOND), 1)]
    for key in kept:
        index.found(ChunkEntry(key, BLOCK_BYTES), 0.0)

    (fault,) = unread.faults(index)

    assert fault == (
        "hidden states",
        "the disk holds hidden states of the form 0/3/0, and only 1/2/0 is read",
        "--hidden-form",
    )
    index.forget(kept[-1])
    assert list(unread.faults(index)) == []
