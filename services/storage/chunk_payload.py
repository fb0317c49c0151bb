"""The checksums of a chunk's payload: one for each page and unit (``KvGeometry``), as host pools keep them.

Because the tables of a chunk and of a host pool are alike, a page is hashed once: a payload read from a tier is
verified here, and the resulting table goes into the host pool as it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.storage.chunk_format import Checksums, ChunkHeader, is_zero, pages_shape
from shared.errors import IntegrityError
from shared.messages.pools import KvGeometry
from shared.native.page_units import hash_pages


def hash_payload(payload: memoryview, geometry: KvGeometry, identities: bytes) -> Checksums:
    """Return the checksums uint64 [pages, units] of contiguous pages; ``identities`` is 16 bytes a page.

    The same figures as ``shared.memory.host_pool.layer_checksum``.
    """
    return hash_pages(_pages(payload, geometry), identities)


def verify_payload(
    blob: memoryview,
    header: ChunkHeader,
    target: npt.NDArray[np.uint8] | None = None,
    places: npt.NDArray[np.int32] | None = None,
) -> Checksums:
    """Check the payload of an unsealed blob against its header, in one pass.

    The pages are copied on the way to ``target``, before it is known whether all are right (``hash_pages``). Return the
    checksums, uint64 [pages, units]. The host pool's table takes them as they are. Raises IntegrityError:
    ``wrong_checksum``, naming the first page and unit, or ``sealed``.
    """
    if header.is_sealed:
        raise IntegrityError("a sealed chunk must be opened before it can be verified", code="sealed")
    geometry = header.geometry
    end = header.header_bytes + header.payload_bytes
    pages = _pages(blob[header.header_bytes : end], geometry)
    actual, expected = hash_pages(pages, header.identities, target, places), header.checksums
    if not np.array_equal(actual, expected):
        page, unit = np.argwhere(actual != expected)[0].tolist()
        kind = "unit" if geometry.is_hidden else "layer"
        raise IntegrityError(
            f"wrong checksum: page {page} of chunk {header.identity.hex()} in {kind} {unit} has "
            f"{actual[page, unit]:016x}, not {expected[page, unit]:016x}",
            code="wrong_checksum",
        )
    if not is_zero(blob[end : header.nbytes]):
        raise IntegrityError(f"chunk {header.identity.hex()} is not filled up with zeros", code="wrong_checksum")
    return expected


def _pages(payload: memoryview, geometry: KvGeometry) -> npt.NDArray[np.uint8]:
    return np.frombuffer(payload, np.uint8).reshape(-1, *pages_shape(geometry)[1:])
