"""Chunks that one read brings from another node's host pool: bytes, identities and checksums of their wanted pages.

Arrived data is verified in memory of this process and copied to the host pool, in one pass over the bytes, and only
whole chunks that pass are sealed there: a page that the lender overwrote meanwhile, or that is damaged, is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage import measures
from services.storage.backends import ChunkKey, whole_blocks
from services.storage.chunk_gathering import seal_pages
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.save_check import NOWHERE
from services.storage.mover import merge_runs
from services.storage.sharing.engine import Span, TransferEngine
from shared.chunks import chunk_pages
from shared.errors import IntegrityError, InvalidRequest
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.memory.host_pool import CHECKSUM_BYTES
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import Lender
from shared.native.page_units import hash_pages

MOST_CHUNKS = 16
"""Most chunks of one read. With more there would be nothing to verify while the next read runs."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection to one incarnation of a lender."""

    peer: str
    address: int
    handle: PoolHandle


@dataclass(frozen=True, slots=True)
class LentGroup:
    """Consecutive chunks of a fetch, by their pages that are to be brought."""

    keys: tuple[ChunkKey, ...]
    ends: npt.NDArray[np.int64]
    """Number of pages up to the end of each chunk, int64 [chunks]."""
    identities: bytes
    """Identities of the pages, 16 bytes each."""
    lent: npt.NDArray[np.int32]
    """The lender's page numbers, int32 [pages]."""
    own: npt.NDArray[np.int32]
    """Page numbers in this node's host pool, int32 [pages]."""

    def chunk_bytes(self, page_bytes: int) -> list[int]:
        """Return the bytes to bring of each chunk."""
        sizes: list[int] = (np.diff(self.ends, prepend=0) * page_bytes).tolist()
        return sizes


def slot_nbytes(geometry: KvGeometry, chunks: int) -> int:
    """Return the bytes of memory for one read: pages, and behind them their tables."""
    page = geometry.page_bytes + DIGEST_BYTES + CHECKSUM_BYTES * geometry.units
    return whole_blocks(chunks * chunk_pages(geometry.page_size) * page)


def chunks_a_read(geometry: KvGeometry, staging_bytes: int) -> int:
    """Return how many chunks one read may bring, so that four reads fit in so much memory; at least one."""
    return max(1, min(MOST_CHUNKS, staging_bytes // 4 // slot_nbytes(geometry, 1)))


def groups_of(lender: Lender, chunks: Sequence[FetchChunk], most: int) -> list[LentGroup]:
    """Return a fetch as reads of at most ``most`` chunks, and at least two reads where it has several chunks.

    Raises InvalidRequest for a lender's pages that do not match these chunks.
    """
    each = [len(chunk.host_pages) for chunk in chunks]
    if len(lender.pages) != sum(each) * 4:
        raise InvalidRequest(f"{len(lender.pages)} bytes are no list of {sum(each)} pages of the lender")
    lent = np.split(np.frombuffer(lender.pages, "<i4"), np.cumsum(each)[:-1])
    size = min(most, max(1, -(-len(chunks) // 2)))
    starts = range(0, len(chunks), size)
    return [_group(chunks[start : start + size], lent[start : start + size]) for start in starts]


def _group(chunks: Sequence[FetchChunk], lent: Sequence[npt.NDArray[np.int32]]) -> LentGroup:
    own, theirs = np.concatenate([chunk.host_pages for chunk in chunks]), np.concatenate(lent)
    is_wanted = own != NOWHERE
    if (theirs[is_wanted] < 0).any():
        raise InvalidRequest("the lender's page is not named for a page that is to be brought")
    identities = np.frombuffer(b"".join(chunk.identities for chunk in chunks), np.uint8).reshape(-1, DIGEST_BYTES)
    wanted = [int((chunk.host_pages != NOWHERE).sum()) for chunk in chunks]
    return LentGroup(
        keys=tuple(chunk.key for chunk in chunks),
        ends=np.cumsum(wanted),
        identities=identities[is_wanted].tobytes(),
        lent=theirs[is_wanted],
        own=own[is_wanted],
    )


def bring_group(
    engine: TransferEngine, link: Link, group: LentGroup, buffer: memoryview, host: HostPoolView, timeout_s: float
) -> tuple[int, str]:
    """Read a group into ``buffer``, copy it into the host pool, and seal its leading sound chunks there. Blocking.

    Return how many chunks these are, and why not all of them. Raises InvalidRequest for a page that the lender does not
    have, and what the engine raises.
    """
    geometry, pages = host.geometry, len(group.lent)
    if not pages:
        return len(group.keys), ""
    if int(group.lent.max()) >= link.handle.pages:
        raise InvalidRequest(f"the lender's pool of {link.handle.pages} pages has no page {int(group.lent.max())}")
    row = CHECKSUM_BYTES * geometry.units
    memory = np.frombuffer(buffer, np.uint8)
    payload, tables = memory[: pages * geometry.page_bytes], memory[pages * geometry.page_bytes :]
    found, table = tables[: pages * DIGEST_BYTES], tables[pages * DIGEST_BYTES :][: pages * row]
    their_identities = link.address + link.handle.table_offset
    their_checksums = their_identities + link.handle.pages * DIGEST_BYTES
    columns = (
        (payload.ctypes.data, link.address, geometry.page_bytes),
        (found.ctypes.data, their_identities, DIGEST_BYTES),
        (table.ctypes.data, their_checksums, row),
    )
    places = np.arange(pages, dtype=np.int32)
    spans: list[Span] = [
        (here + into * size, there + first * size, count * size)
        for first, into, count in merge_runs(group.lent, places, pages)
        for here, there, size in columns
    ]
    engine.read(link.peer, spans, timeout_s)
    identities = np.frombuffer(group.identities, np.uint8).reshape(-1, DIGEST_BYTES)
    # Copied, because another read will use the memory, and so that it is aligned.
    checksums = table.copy().view("<u8").reshape(pages, geometry.units)
    is_right = (found.reshape(-1, DIGEST_BYTES) == identities).all(axis=1)
    shaped = payload.reshape(pages, geometry.units, geometry.unit_bytes)
    host.clear(group.own)
    is_sound = (hash_pages(shaped, group.identities, host.pages, group.own) == checksums).all(axis=1)
    sound = _leading(is_right & is_sound)
    chunks = int(np.searchsorted(group.ends, sound, side="right"))
    kept = slice(int(group.ends[chunks - 1]) if chunks else 0)
    seal_pages(host, group.own[kept], checksums[kept], identities[kept])
    return chunks, "" if sound == pages else _tell(group.keys[chunks], is_replaced=not is_right[sound])


def _leading(is_good: npt.NDArray[np.bool_]) -> int:
    """Return how many entries precede the first false one."""
    return len(is_good) if is_good.all() else int(np.argmin(is_good))


def _tell(key: ChunkKey, *, is_replaced: bool) -> str:
    identity = key.identity.hex()
    if is_replaced:
        error = IntegrityError(f"the lender's pages of chunk {identity} were replaced", code="wrong_identity")
    else:
        error = IntegrityError(f"a page of chunk {identity} was damaged on its way", code="wrong_checksum")
    measures.BAD_CHUNKS.labels("lender", error.code).inc()
    return error.message
