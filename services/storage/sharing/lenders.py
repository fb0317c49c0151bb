"""Pages out of the host memory of another node's storage: a source of chunks like disk and object store.

The scheduler names the lender and its pages, and keeps their copies there until the fetch is over. Bytes, identities
and checksums are read from its memory past its processor, into memory of this process, and only what verifies here goes
on into the host pool: a page that the lender overwrote meanwhile, or that is damaged, is a miss.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage import measures
from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import Checksums, blob_nbytes, payload_view
from services.storage.chunk_payload import hash_payload
from services.storage.chunk_source import Lost
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import Source
from services.storage.core.save_check import NOWHERE
from services.storage.io_threads import IoThreads
from services.storage.mover import merge_runs
from services.storage.sharing.engine import LateRead, Span, TransferEngine
from services.storage.staging import Staging
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.chunks import chunk_pages
from shared.codec import decode, encode
from shared.errors import IntegrityError, InvalidRequest, ThermoclineError, TransportError
from shared.ids import DIGEST_BYTES
from shared.memory.host_pool import CHECKSUM_BYTES
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.sharing import OpenedPool, OpenPool
from shared.messages.storage_plans import Lender

MOST_LENDERS = 64
"""Lenders to which this storage keeps a connection; the one that was asked longest ago makes room."""

OPEN_S = 5.0
"""How long a lender may take to say where its pool is."""

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection to one incarnation of a lender."""

    peer: str
    address: int
    handle: PoolHandle


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A verified chunk out of another node's memory, to be given back by :meth:`LenderSource.finish`."""

    key: ChunkKey
    place: int
    blob: memoryview
    checksums: Checksums
    nbytes: int
    buffer: memoryview
    source: Source = "lender"


class Lenders:
    """Connections to the storages of other nodes, and memory for what is read from them. Owned by the event loop."""

    def __init__(
        self,
        bus: Bus,
        engine: TransferEngine,
        threads: IoThreads,
        *,
        staging_bytes: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._threads = threads
        self._staging_bytes = staging_bytes
        self._clock_s = clock_s
        self._links: OrderedDict[tuple[str, str], _Link] = OrderedDict()
        self._opening: dict[tuple[str, str], asyncio.Task[_Link]] = {}
        self._geometry: KvGeometry | None = None
        self._buffers: Buffers | None = None
        self._most_buffers = 0
        self._late: list[tuple[memoryview, LateRead]] = []

    def open(self, geometry: KvGeometry) -> None:
        """There is a pool of this geometry to read into. Blocking. Raises ConfigError without room for one chunk of it,
        TransportError when its memory cannot be registered.
        """
        staging = Staging(self._staging_bytes, _slot_nbytes(geometry))
        self._engine.register(staging.memory())
        self._geometry, self._buffers, self._most_buffers = geometry, Buffers(staging), staging.buffers

    def source(self, lender: Lender, chunks: list[FetchChunk]) -> LenderSource:
        """Return what one fetch reads from. Raises InvalidRequest for an order without sense."""
        if self._geometry is None or self._buffers is None:
            raise InvalidRequest("there is no host pool yet")
        return LenderSource(self, lender, _lent_pages(lender, chunks), self._geometry, self._buffers)

    async def link(self, lender: Lender) -> _Link:
        """Return the connection to this incarnation, made when there is none. Raises TransportError."""
        name = (lender.storage_id, lender.incarnation)
        found = self._links.get(name)
        if found is None:
            opening = self._opening.get(name)
            if opening is None:
                opening = asyncio.create_task(self._open_link(lender), name=f"open {lender.storage_id}")
                self._opening[name] = opening
                opening.add_done_callback(lambda _: self._opening.pop(name, None))
            found = await asyncio.shield(opening)
        else:
            self._links.move_to_end(name)
        return found

    async def read(self, link: _Link, chunk: FetchChunk, lent: npt.NDArray[np.int32], left_s: float) -> Borrowed:
        """Read one chunk and verify it. Raises TransportError, or IntegrityError for what is not what it should be."""
        assert self._buffers is not None
        assert self._geometry is not None
        self._take_back()
        if len(self._late) >= self._most_buffers:
            raise TransportError("every buffer is held by a read that is late")
        buffer = await self._buffers.take(is_urgent=True)
        begun_s, is_kept, is_late = self._clock_s(), False, False
        try:
            arguments = (self._engine, link, chunk, lent, buffer, self._geometry, left_s)
            checksums = await self._threads.run(True, _read_chunk, *arguments)
            nbytes = int((chunk.host_pages != NOWHERE).sum()) * self._geometry.page_bytes
            measures.moved("lender", "read", nbytes, self._clock_s() - begun_s)
            is_kept = True
            blob = buffer[: blob_nbytes(self._geometry)]
            return Borrowed(chunk.key, chunk.place, blob, checksums, nbytes, buffer)
        except LateRead as error:
            is_late = True
            self._late.append((buffer, error))
            raise
        except IntegrityError as error:
            measures.BAD_CHUNKS.labels("lender", error.code).inc()
            raise
        finally:
            if not is_kept and not is_late:
                self._buffers.give_back(buffer, is_urgent=True)

    def forget(self, lender: Lender) -> None:
        """Drop the connection after a failed read; it is made anew when it is asked for again."""
        measures.TIER_FAILURES.labels("lender").inc()
        link = self._links.pop((lender.storage_id, lender.incarnation), None)
        if link is not None:
            self._engine.disconnect(link.peer)

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is degraded in sharing: what, why, and the flag."""
        self._take_back()
        if self._late:
            yield "sharing", f"{len(self._late)} buffers are held by reads that are late", "--share"

    def close(self) -> None:
        """Nothing is read any more."""
        for opening in self._opening.values():
            opening.cancel()
        self._engine.close()
        if self._buffers is not None:
            self._buffers.close()

    def _take_back(self) -> None:
        """Have the buffers of late reads that are over by now."""
        late, self._late = self._late, []
        for buffer, read in late:
            if self._buffers is not None and read.is_over():
                self._buffers.give_back(buffer, is_urgent=True)
            else:
                self._late.append((buffer, read))

    async def _open_link(self, lender: Lender) -> _Link:
        call = OpenPool(engine=self._engine.name, incarnation=lender.incarnation)
        subject = subjects.rpc("storage", "pool", lender.storage_id)
        try:
            opened = decode(await self._bus.call(subject, encode(call), timeout_s=OPEN_S), OpenedPool)
        except ThermoclineError as error:
            raise TransportError(f"storage {lender.storage_id} does not share its pool: {error.message}") from error
        if opened.incarnation != lender.incarnation or opened.handle.geometry != self._geometry:
            raise TransportError(f"storage {lender.storage_id} has another pool than what was asked for")
        peer = await asyncio.to_thread(self._engine.connect, opened.metadata)
        link = _Link(peer, opened.address, opened.handle)
        self._links[lender.storage_id, lender.incarnation] = link
        while len(self._links) > MOST_LENDERS:
            _, oldest = self._links.popitem(last=False)
            self._engine.disconnect(oldest.peer)
        _log.info("lender_connected", storage=lender.storage_id, pages=opened.handle.pages)
        return link


class LenderSource:
    """Chunks of one fetch, from one lender."""

    def __init__(
        self,
        lenders: Lenders,
        lender: Lender,
        lent: Mapping[ChunkKey, tuple[FetchChunk, npt.NDArray[np.int32]]],
        geometry: KvGeometry,
        buffers: Buffers,
    ) -> None:
        self._lenders = lenders
        self._lender = lender
        self._lent = lent
        self._geometry = geometry
        self._buffers = buffers

    def is_near(self, key: ChunkKey) -> bool:
        """Each read takes a thread."""
        return True

    async def read(self, key: ChunkKey, place: int, ordered_key: str, left_s: Callable[[], float]) -> Borrowed | Lost:
        """Read one chunk within ``left_s()`` seconds. Never raises what went wrong."""
        chunk, lent = self._lent[key]
        try:
            async with asyncio.timeout(max(0.001, left_s())):
                link = await self._lenders.link(self._lender)
            return await self._lenders.read(link, chunk, lent, max(0.001, left_s()))
        except IntegrityError as error:
            return Lost(is_missing=False, error=error.message)
        except (ThermoclineError, TimeoutError) as error:
            self._lenders.forget(self._lender)
            return Lost(is_missing=False, error=str(error) or "the lender took too long")

    def finish(self, brought: Borrowed, *, is_promoted: bool) -> None:
        """Done with it."""
        self._buffers.give_back(brought.buffer, is_urgent=True)


def _slot_nbytes(geometry: KvGeometry) -> int:
    """Of a buffer: a blob of a chunk, whose pages lie where they always do, and behind it their tables."""
    tables = chunk_pages(geometry.page_size) * (DIGEST_BYTES + CHECKSUM_BYTES * geometry.units)
    return blob_nbytes(geometry) + -(-tables // BLOCK_BYTES) * BLOCK_BYTES


def _lent_pages(lender: Lender, chunks: list[FetchChunk]) -> dict[ChunkKey, tuple[FetchChunk, npt.NDArray[np.int32]]]:
    total = sum(len(chunk.host_pages) for chunk in chunks)
    if len(lender.pages) != total * 4:
        raise InvalidRequest(f"{len(lender.pages)} bytes are no list of {total} pages of the lender")
    pages, lent, at = np.frombuffer(lender.pages, "<i4"), {}, 0
    for chunk in chunks:
        own = pages[at : at + len(chunk.host_pages)]
        at += len(own)
        if ((own < 0) & (chunk.host_pages != NOWHERE)).any():
            raise InvalidRequest("the lender's page is not named for a page that is to be brought")
        lent[chunk.key] = (chunk, own)
    return lent


def _read_chunk(
    engine: TransferEngine,
    link: _Link,
    chunk: FetchChunk,
    lent: npt.NDArray[np.int32],
    buffer: memoryview,
    geometry: KvGeometry,
    timeout_s: float,
) -> Checksums:
    """Bring the wanted pages and their tables into the buffer, and verify them. Blocking: for an I/O thread.

    Returns the checksums, uint64 [pages, units]. Raises as :meth:`Lenders.read` does.
    """
    handle, pages = link.handle, len(lent)
    wanted = np.flatnonzero(chunk.host_pages != NOWHERE).astype(np.int32)
    sources = lent[wanted]
    if len(sources) and int(sources.max()) >= handle.pages:
        raise InvalidRequest(f"the lender's pool of {handle.pages} pages has no page {int(sources.max())}")
    payload = np.frombuffer(payload_view(buffer, geometry), np.uint8)
    tables = np.frombuffer(buffer, np.uint8)[blob_nbytes(geometry) :]
    units = geometry.units * CHECKSUM_BYTES
    identities, table = tables[: pages * DIGEST_BYTES], tables[pages * DIGEST_BYTES :][: pages * units]
    their_identities = link.address + handle.table_offset
    their_checksums = their_identities + handle.pages * DIGEST_BYTES
    columns = (
        (payload.ctypes.data, link.address, geometry.page_bytes),
        (identities.ctypes.data, their_identities, DIGEST_BYTES),
        (table.ctypes.data, their_checksums, units),
    )
    spans: list[Span] = [
        (here + into * size, there + first * size, count * size)
        for first, into, count in merge_runs(sources, wanted, max(1, len(sources)))
        for here, there, size in columns
    ]
    if spans:
        engine.read(link.peer, spans, timeout_s)
    checksums = table.view("<u8").reshape(pages, geometry.units).copy()
    found, named = identities.reshape(-1, DIGEST_BYTES), np.frombuffer(chunk.identities, np.uint8)
    if not np.array_equal(found[wanted], named.reshape(-1, DIGEST_BYTES)[wanted]):
        raise IntegrityError(
            f"the lender's pages of chunk {chunk.key.identity.hex()} were replaced", code="wrong_identity"
        )
    # Pages of a run are hashed in one call: there are many of them, and they are small.
    for _, first, count in merge_runs(wanted, wanted, max(1, len(wanted))):
        run = slice(first, first + count)
        bytes_of_run = payload_view(buffer, geometry)[first * geometry.page_bytes : run.stop * geometry.page_bytes]
        named_of_run = chunk.identities[first * DIGEST_BYTES : run.stop * DIGEST_BYTES]
        if not np.array_equal(hash_payload(bytes_of_run, geometry, named_of_run), checksums[run]):
            raise IntegrityError(
                f"a page of chunk {chunk.key.identity.hex()} was damaged on its way", code="wrong_checksum"
            )
    return checksums
