"""Copies of a chunk's pages from the pools into a buffer, and from a buffer into a pool. Blocking: for I/O threads.

Pages are hashed once. Pages of the host pool must hash to the checksums of the pool's own table, which the chunk's
header then carries; pages of a device are hashed here for the first time; and pages for the host pool are verified
against their header before they are sealed, so that its checksums are written, not computed. For chunks of hidden
states the host pool is the hidden pool, to which workers write too: pages that they overwrite are found in the same
way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.storage.chunk_format import Checksums, ChunkHeader, payload_view
from services.storage.chunk_payload import hash_payload, verify_payload
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.save_check import NOWHERE, SaveChunk
from services.storage.mover import merge_runs
from shared.errors import IntegrityError, InvalidRequest
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.memory.device_pool_view import DevicePages
from shared.messages.pools import KvGeometry


def pages_of(blob: memoryview, geometry: KvGeometry) -> npt.NDArray[np.uint8]:
    """Return the payload of a blob as a host pool has its pages: uint8 [pages, units, unit_bytes]. No copy."""
    payload = np.frombuffer(payload_view(blob, geometry), dtype=np.uint8)
    return payload.reshape(-1, geometry.units, geometry.unit_bytes)


def gather_chunk(chunk: SaveChunk, blob: memoryview, host: HostPoolView, device: DevicePages | None) -> Checksums:
    """Copy the pages of ``chunk`` into the payload of ``blob``; return their checksums, uint64 [pages, units].

    Raises IntegrityError (``wrong_identity``, ``wrong_checksum``) when a host page does not hold, or no more, what the
    order says, and TransportError when the device pool cannot be read.
    """
    geometry = host.geometry
    pages = pages_of(blob, geometry)
    from_host = np.flatnonzero(chunk.host_pages != NOWHERE).astype(np.int32)
    sources = chunk.host_pages[from_host]
    # The table is read before the bytes: a page that is overwritten meanwhile cannot have the checksum read here.
    identities, expected = host.identities[sources].tobytes(), host.checksums[sources].copy()
    wanted = np.frombuffer(chunk.identities, np.uint8).reshape(-1, DIGEST_BYTES)[from_host].tobytes()
    if identities != wanted:
        raise IntegrityError(f"host pages of chunk {chunk.key.identity.hex()} were replaced", code="wrong_identity")
    for first, into, count in _runs(sources, from_host):
        pages[into : into + count] = host.pages[first : first + count]
    from_device = np.flatnonzero(chunk.host_pages == NOWHERE).astype(np.int32)
    if len(from_device):
        if device is None:
            raise InvalidRequest("no worker is named to read from")
        for run in _runs(chunk.device_pages[from_device], from_device):
            device.copy_run(run, pages)
    checksums = hash_payload(payload_view(blob, geometry), geometry, chunk.identities)
    if not np.array_equal(checksums[from_host], expected):
        raise IntegrityError(f"host pages of chunk {chunk.key.identity.hex()} are damaged", code="wrong_checksum")
    return checksums


def scatter_chunk(chunk: FetchChunk, blob: memoryview, checksums: Checksums, host: HostPoolView) -> None:
    """Copy the wanted pages of a verified chunk into the host pool, and seal them with its ``checksums``."""
    pages = pages_of(blob, host.geometry)
    kept = np.flatnonzero(chunk.host_pages != NOWHERE).astype(np.int32)
    targets = chunk.host_pages[kept]
    host.clear(targets)
    for first, into, count in _runs(kept, targets):
        host.pages[into : into + count] = pages[first : first + count]
    _seal(chunk, kept, checksums, host)


def verify_into(chunk: FetchChunk, blob: memoryview, header: ChunkHeader, host: HostPoolView) -> None:
    """Do as :func:`scatter_chunk` with an opened chunk, and verify its payload on the way.

    Raises IntegrityError as ``verify_payload`` does; the wanted pages hold nothing then.
    """
    kept = np.flatnonzero(chunk.host_pages != NOWHERE)
    host.clear(chunk.host_pages[kept])
    _seal(chunk, kept, verify_payload(blob, header, host.pages, chunk.host_pages), host)


def seal_pages(
    host: HostPoolView, targets: npt.NDArray[np.int32], checksums: Checksums, identities: npt.NDArray[np.uint8]
) -> None:
    """Seal cleared host pages whose bytes are there and right; ``checksums`` and ``identities`` have a row for each.

    A page is cleared before its bytes change, and its identity is written last, so a reader never finds half a page.
    """
    host.checksums[targets] = checksums
    host.identities[targets] = identities


def _seal(chunk: FetchChunk, kept: npt.NDArray[np.integer], checksums: Checksums, host: HostPoolView) -> None:
    identities = np.frombuffer(chunk.identities, np.uint8).reshape(-1, DIGEST_BYTES)
    seal_pages(host, chunk.host_pages[kept], checksums[kept], identities[kept])


def _runs(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, second, count): pages that are consecutive on both sides."""
    return merge_runs(first, second, max(1, len(first)))
