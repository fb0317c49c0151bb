"""The checksums of a chunk's payload: one for each page and unit (``KvGeometry``), as host pools keep them.

Because the tables of a chunk and of a host pool are alike, a page is hashed once: a payload read from a tier is
verified here, and the resulting table goes into the host pool as it is.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from services.storage.chunk_format import Checksums, ChunkHeader, is_zero
from shared.errors import IntegrityError
from shared.ids import DIGEST_BYTES
from shared.messages.pools import KvGeometry

_SEED_BYTES = 8


def hash_payload(payload: memoryview, geometry: KvGeometry, identities: bytes) -> Checksums:
    """Return the checksums uint64 [pages, units] of contiguous pages; ``identities`` is 16 bytes a page.

    The same figures as ``shared.memory.host_pool.layer_checksum``.
    """
    return np.array(_digests(payload, geometry, identities), np.uint64).reshape(-1, geometry.units)


def _digests(payload: memoryview, geometry: KvGeometry, identities: bytes) -> list[int]:
    unit_bytes, page_bytes, digest = geometry.unit_bytes, geometry.page_bytes, xxhash.xxh3_64_intdigest
    found: list[int] = []
    for page, start in enumerate(range(0, payload.nbytes, page_bytes)):
        # One seed a page: for small pages this loop, not the hashing, takes the time.
        seed = int.from_bytes(identities[page * DIGEST_BYTES : page * DIGEST_BYTES + _SEED_BYTES], "little")
        found += [digest(payload[at : at + unit_bytes], seed) for at in range(start, start + page_bytes, unit_bytes)]
    return found


def verify_payload(blob: memoryview, header: ChunkHeader) -> Checksums:
    """Check the payload of an unsealed blob against its header, in one pass.

    Return the checksums, uint64 [pages, units]. The host pool's table takes them as they are. Raises IntegrityError:
    ``wrong_checksum``, naming the first page and unit, or ``sealed``.
    """
    if header.is_sealed:
        raise IntegrityError("a sealed chunk must be opened before it can be verified", code="sealed")
    geometry = header.geometry
    end = header.header_bytes + header.payload_bytes
    found = _digests(blob[header.header_bytes : end], geometry, header.identities)
    if struct.pack(f"<{len(found)}Q", *found) != header.checksum_table:
        actual, expected = np.array(found, np.uint64).reshape(-1, geometry.units), header.checksums
        page, unit = np.argwhere(actual != expected)[0].tolist()
        kind = "unit" if geometry.is_hidden else "layer"
        raise IntegrityError(
            f"wrong checksum: page {page} of chunk {header.identity.hex()} in {kind} {unit} has "
            f"{actual[page, unit]:016x}, not {expected[page, unit]:016x}",
            code="wrong_checksum",
        )
    if not is_zero(blob[end : header.nbytes]):
        raise IntegrityError(f"chunk {header.identity.hex()} is not filled up with zeros", code="wrong_checksum")
    return header.checksums
