"""Sparse copies for tests, the KV that they are of, and a disk with a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.storage.backends import ChunkKey, Directories
from services.storage.buffers import Buffers
from services.storage.chunk_format import payload_view
from services.storage.chunk_keys import ChunkKeys
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.paced_reads import PacedReads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.copies import SparseCopies
from services.storage.sparse.format import SparseHeader
from services.storage.sparse.key_codes import encode_keys
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import areas, complete, copy_pages
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.read_plan import region_bytes
from services.storage.sparse.reader import SparseReader
from services.storage.staging import Staging
from shared.messages.base import pack_int32
from shared.messages.pools import DTYPE_BYTES, KvGeometry
from shared.messages.sparse_reads import ReadSparse
from tests.chunk_makers import MadeChunk, aligned, make_chain
from tests.memory_backend import MemoryBackend
from tests.unit.storage.made_ciphers import make_cipher

GEOMETRY = KvGeometry(layers=3, kv_heads=4, head_dim=8, page_size=16, dtype="float16")
LAYOUT = SparseLayout.of(GEOMETRY, block_tokens=4)
CIPHER = make_cipher(alice=1)


def kv_of(chunk: MadeChunk) -> npt.NDArray[np.uint8]:
    """Its KV by token, uint8 [layers, 2, tokens, kv_heads, head_bytes]."""
    geometry = chunk.header.geometry
    head_bytes = geometry.head_dim * DTYPE_BYTES[geometry.dtype]
    pages = np.frombuffer(payload_view(chunk.blob, geometry), np.uint8)
    paged = pages.reshape(-1, geometry.layers, 2, geometry.page_size, geometry.kv_heads, head_bytes)
    by_layer = paged.transpose(1, 2, 0, 3, 4, 5)
    return np.ascontiguousarray(by_layer).reshape(geometry.layers, 2, -1, geometry.kv_heads, head_bytes)


def copy_of(
    chunk: MadeChunk, layout: SparseLayout = LAYOUT, *, key_id: str = "", order: Sequence[int] | None = None
) -> memoryview:
    """The copy of a chunk, sealed where there is a key. Releases before 0.3 wrote some with rows in another order."""
    header = SparseHeader.of(chunk.header, layout, key_id=key_id, cipher=CIPHER)
    blob, plain = aligned(header.blob_bytes), np.arange(layout.tokens, dtype=np.uint32)
    blob[:] = b"\xa5" * blob.nbytes  # Buffers are used again.
    copy_pages(payload_view(chunk.blob, chunk.header.geometry), blob, layout, is_sealed=header.is_sealed)
    mapping = plain if order is None else np.array(order, np.uint32)
    if order is not None:
        _, rows = areas(blob, layout, is_sealed=header.is_sealed)
        rows[...] = rows[:, :, mapping]
    complete(blob, header, mapping, CIPHER)
    return blob


def copy_key(chunk: MadeChunk, layout: SparseLayout = LAYOUT) -> ChunkKey:
    return layout.key(chunk.header.namespace, chunk.header.identity)


@dataclass
class Told:
    """Stands for the scheduler's ear, and says nothing of what the disk still has."""

    disk: DiskTier | None = None
    gone: list[ChunkKey] = field(default_factory=list)
    there: list[ChunkKey] = field(default_factory=list)
    events: int = 0

    async def dropped(self, keys: Sequence[ChunkKey]) -> None:
        assert self.disk is not None
        self.gone += [key for key in keys if key not in self.disk]

    async def listed(self, keys: Sequence[ChunkKey]) -> None:
        assert self.disk is not None
        self.there += [key for key in keys if key in self.disk]
        self.events += 1


@dataclass
class Reading:
    """A disk that holds the copies of some chunks of one sequence, and who reads it."""

    layout: SparseLayout
    chunks: list[MadeChunk]
    kv: npt.NDArray[np.uint8]
    """Of the whole sequence: [layers, 2, tokens, kv_heads, head_bytes]."""
    disk: DiskTier
    threads: IoThreads
    turns: ChunkTurns
    heads: OpenedHeads
    told: Told
    reader: SparseReader
    key_id: str

    @property
    def keys(self) -> list[ChunkKey]:
        return [copy_key(chunk, self.layout) for chunk in self.chunks]

    async def put(self, chunk: MadeChunk, blob: memoryview) -> None:
        key = copy_key(chunk, self.layout)
        async with self.turns.writing(key):
            self.heads.forget(key)
            written = await self.disk.write(Arrival(key, blob.nbytes, 0, None, 0.0), blob)
        assert written.outcome == "stored", written

    def call(self, part: str, layer: int, *, heads: Sequence[int] = (), start: int = 0, end: int = 0,
             tokens: Sequence[Sequence[int]] = (), layers: int = 1, **change: object) -> ReadSparse:  # fmt: skip
        """A read of the whole sequence's chunks, with the right size."""
        geometry = self.layout.geometry
        listed = [token for of_list in tokens for token in of_list]
        count = len(tokens[0]) if tokens else end - start
        each = 2 * geometry.kv_heads if part == "kv" else len(heads)
        fields: dict[str, object] = {
            "namespace": self.chunks[0].header.namespace,
            "depth": 0,
            "chunks": b"".join(chunk.header.identity for chunk in self.chunks),
            "layer": layer,
            "part": part,
            "buffer": "b",
            "offset": 0,
            "nbytes": layers
            * each
            * count
            * (self.layout.probe_row_bytes if part == "codes" else self.layout.head_bytes),
            "heads": tuple(heads),
            "start": start,
            "end": end,
            "tokens": pack_int32(listed),
            "key_id": self.key_id,
            "layers": layers,
        }
        return ReadSparse(**(fields | change))  # type: ignore[arg-type]

    async def read(self, call: ReadSparse) -> tuple[bytes, int]:
        """(what came, bytes read from the disk)."""
        into = memoryview(bytearray(b"\xee" * call.nbytes))
        nbytes = await self.reader.read(call, into)
        return bytes(into), nbytes

    async def keys_of(self, layer: int, heads: Sequence[int], start: int, end: int) -> tuple[bool, int]:
        """(whether the right bytes came, bytes read)."""
        found, nbytes = await self.read(self.call("keys", layer, heads=heads, start=start, end=end))
        keys = self.kv[layer, 0, start:end][:, list(heads)]
        return found == keys.transpose(1, 0, 2).tobytes(), nbytes

    async def codes_of(
        self, layer: int, heads: Sequence[int], start: int, end: int, *, layers: int = 1
    ) -> tuple[bool, int]:
        """(whether the right codes came, bytes read)."""
        found, nbytes = await self.read(self.call("codes", layer, heads=heads, start=start, end=end, layers=layers))
        keys = self.kv[layer : layer + layers, 0, start:end][:, :, list(heads)].transpose(0, 2, 1, 3)
        return found == encode_keys(keys, self.layout.geometry.dtype).tobytes(), nbytes

    async def kv_of(self, layer: int, tokens: Sequence[int]) -> tuple[bool, int]:
        found, nbytes = await self.read(self.call("kv", layer, tokens=[tokens]))
        return found == self.kv[layer][:, list(tokens)].tobytes(), nbytes

    async def values_of(self, layer: int, heads: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[bool, int]:
        found, nbytes = await self.read(self.call("values", layer, heads=heads, tokens=tokens))
        rows = [self.kv[layer, 1, list(of_head), head] for head, of_head in zip(heads, tokens, strict=True)]
        return found == np.stack(rows).tobytes(), nbytes


@asynccontextmanager
async def reading(
    *,
    layout: SparseLayout = LAYOUT,
    chunks: int = 3,
    backend: Directories | None = None,
    pace: PacedReads | None = None,
    key_id: str = "",
    order: Sequence[int] | None = None,
    with_copies: bool = True,
    quota: int = 2**26,
    gap_bytes: int = 0,
) -> AsyncIterator[Reading]:
    """A reader over a disk with the copies of a sequence of some chunks."""
    backend = backend or MemoryBackend(max_bytes=2**28)
    made = make_chain(chunks, seed=5, geometry=layout.geometry)
    threads, told = IoThreads(4), Told()
    disk = DiskTier(backend, quota, threads, pace=pace)
    told.disk = disk
    turns, heads = ChunkTurns(), OpenedHeads()
    region = max(region_bytes(layout), layout.header_bytes(is_sealed=True))
    buffers = Buffers(Staging(4 * region, region))
    reader = SparseReader(
        layout,
        disk,
        buffers=buffers,
        turns=turns,
        heads=heads,
        keys=ChunkKeys(CIPHER if key_id else None),
        events=told,  # type: ignore[arg-type]
        at_once=4,
        gap_bytes=gap_bytes,
    )
    kv = np.concatenate([kv_of(chunk) for chunk in made], axis=2)
    found = Reading(layout, made, kv, disk, threads, turns, heads, told, reader, key_id)
    removing = asyncio.create_task(disk.removals.run())
    try:
        for chunk in made if with_copies else ():
            await found.put(chunk, copy_of(chunk, layout, key_id=key_id, order=order))
        yield found
    finally:
        disk.removals.stop()
        await removing
        buffers.close()
        threads.close()


@asynccontextmanager
async def copying(
    found: Reading, *, buffers: int = 4, key_id: str = "", runs: bool = True
) -> AsyncIterator[tuple[SparseCopies, Staging]]:
    """Copies for the disk of ``found``, and their memory."""
    blob = found.layout.blob_bytes(is_sealed=True)
    staging = Staging(buffers * blob, blob)
    copies = SparseCopies(
        found.layout,
        found.disk,
        staging=staging,
        turns=found.turns,
        heads=found.heads,
        threads=found.threads,
        keys=ChunkKeys(CIPHER if key_id else None),
        events=found.told,  # type: ignore[arg-type]
    )
    running = asyncio.create_task(copies.run() if runs else asyncio.sleep(0))
    try:
        yield copies, staging
    finally:
        await copies.stop()
        await running
        assert (staging.taken, len(copies)) == (0, 0)
        staging.close()
