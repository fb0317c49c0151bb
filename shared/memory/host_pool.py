"""The page-first host pool: whole pages, one contiguous piece each, with identity and checksums beside them.

Layout of the segment (``PoolHandle``, layout ``page_first``)::

    0             pages       [pages, layers, 2, page_size, kv_heads, head_dim]
    table_offset  identities  [pages, 16] uint8
                  checksums   [pages, layers] little-endian uint64

A pool of hidden pages is laid out alike, with units in the place of layers (``KvGeometry``).

The storage writes, workers read. A page is cleared before it is overwritten and sealed after, so a copy that
died half-way never verifies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from shared.errors import ConfigError, IntegrityError, TransportError
from shared.ids import DIGEST_BYTES
from shared.memory.segment import SharedSegment
from shared.messages.pools import KvGeometry, PoolHandle
from shared.native.page_units import hash_pages

CHECKSUM_BYTES = 8

# The tables start on a cache line, which also aligns the checksums.
_TABLE_ALIGNMENT = 64

_UNSEALED = bytes(DIGEST_BYTES)


def check_geometry(geometry: KvGeometry) -> None:
    """Raise ConfigError for a geometry that no pool can have."""
    fault = geometry.fault()
    if fault:
        raise ConfigError(f"no pool can have this geometry: {geometry}: {fault}")


def table_offset_for(geometry: KvGeometry, pages: int) -> int:
    """Return the byte offset of the identity table in a pool of ``pages`` pages."""
    return -(-pages * geometry.page_bytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


def nbytes_for(geometry: KvGeometry, pages: int) -> int:
    """Return the bytes of a segment that holds ``pages`` pages and their tables."""
    return table_offset_for(geometry, pages) + pages * (DIGEST_BYTES + CHECKSUM_BYTES * geometry.units)


def pages_for(geometry: KvGeometry, nbytes: int) -> int:
    """Return how many pages fit in ``nbytes``, tables included; 0 if not even one does.

    Raises ConfigError for a geometry that no pool can have.
    """
    check_geometry(geometry)
    each = geometry.page_bytes + DIGEST_BYTES + CHECKSUM_BYTES * geometry.units
    pages = max(0, nbytes // each)
    # The gap before the tables may cost pages: more than one only if pages are tiny.
    while pages and nbytes_for(geometry, pages) > nbytes:
        pages -= 1
    return pages


def layer_checksum(layer: npt.NDArray[np.uint8] | memoryview, identity: bytes) -> int:
    """Return the xxh3_64 of one unit of one page (contiguous bytes), seeded with the low 8 identity bytes."""
    data = layer if isinstance(layer, memoryview) else layer.data
    return int(xxhash.xxh3_64_intdigest(data, seed=int.from_bytes(identity[:8], "little")))


class HostPoolView:
    """A mapped host pool.

    ``pages`` is uint8 [pages, units, unit_bytes]; ``identities`` uint8 [pages, 16]; ``checksums`` uint64
    [pages, units]. Units are layers in a pool of KV (``KvGeometry``). All are views of shared
    memory and keep it mapped.
    """

    def __init__(self, segment: SharedSegment, handle: PoolHandle) -> None:
        """View ``segment`` as ``handle`` describes it, unchecked; :meth:`close` closes the segment."""
        geometry, count = handle.geometry, handle.pages
        self.handle = handle
        self._segment = segment
        data, offset = segment.array, handle.table_offset
        page_end, identity_end = count * geometry.page_bytes, offset + count * DIGEST_BYTES
        self.pages: npt.NDArray[np.uint8] = data[:page_end].reshape(count, geometry.units, geometry.unit_bytes)
        self.identities: npt.NDArray[np.uint8] = data[offset:identity_end].reshape(count, DIGEST_BYTES)
        checksum_end = identity_end + count * geometry.units * CHECKSUM_BYTES
        self.checksums: npt.NDArray[np.uint64] = (
            data[identity_end:checksum_end].view("<u8").reshape(count, geometry.units)
        )

    @classmethod
    def create(cls, prefix: str, geometry: KvGeometry, pages: int, *, prefault: bool = True) -> HostPoolView:
        """Create an empty pool owned by this process. Raises ConfigError when there is no room for it."""
        check_geometry(geometry)
        if pages < 1:
            raise ConfigError(f"a host pool needs room for one page at least: {geometry.page_bytes} bytes and tables")
        nbytes = nbytes_for(geometry, pages)
        segment = SharedSegment.create(prefix, "host", nbytes, prefault=prefault)
        handle = PoolHandle(
            kind="shm",
            layout="page_first",
            name=segment.name,
            nbytes=nbytes,
            pages=pages,
            geometry=geometry,
            table_offset=table_offset_for(geometry, pages),
        )
        return cls(segment, handle)

    @classmethod
    def attach(cls, handle: PoolHandle, *, writable: bool = True) -> HostPoolView:
        """Map a pool that another process made.

        Raises TransportError if the handle is not of a host pool, contradicts itself, or its segment is missing or of
        another size.
        """
        _check_handle(handle)
        return cls(SharedSegment.attach(handle.name, handle.nbytes, writable=writable), handle)

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of the pool's pages."""
        return self.handle.geometry

    def flat_pages(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of all pages, uint8, flat, without the tables. Raises TransportError once closed."""
        return self._segment.array[: self.handle.pages * self.geometry.page_bytes]

    def segment_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the whole segment, uint8, flat: pages, then identities and checksums.

        Raises TransportError once closed.
        """
        return self._segment.array

    def clear(self, page: int | slice | npt.NDArray[np.int32]) -> None:
        """Unseal the page (or pages): nothing verifies until it is sealed again. The KV bytes stay as they are."""
        self.identities[page] = 0
        self.checksums[page] = 0

    def seal_page(self, page: int, identity: bytes) -> None:
        """Seal the bytes now in ``page`` as those of ``identity``: write its checksums, then the identity.

        Raises IntegrityError for an identity that is not 16 bytes or all zero (which marks a cleared page).
        """
        if len(identity) != DIGEST_BYTES or identity == _UNSEALED:
            raise IntegrityError(f"page {page} cannot be sealed as {identity.hex() or 'nothing'}")
        self.checksums[page] = hash_pages(self.pages[page][None], identity)[0]
        self.identities[page] = np.frombuffer(identity, dtype=np.uint8)

    def verify_layer(self, page: int, layer: int, identity: bytes) -> None:
        """Raise IntegrityError with the reason unless ``page`` holds the bytes sealed as ``identity``.

        Only unit ``layer`` of it is checked, which in a pool of KV is a layer.
        """
        found = self.identities[page].tobytes()
        if found != identity or found == _UNSEALED:
            held = "has never been sealed" if found == _UNSEALED else f"holds {found.hex()}"
            raise IntegrityError(
                f"wrong identity: host page {page} of {self.handle.name} {held}, not {identity.hex()}",
                code="wrong_identity",
            )
        expected = int(self.checksums[page, layer])
        actual = layer_checksum(self.pages[page, layer], identity)
        if actual != expected:
            raise IntegrityError(
                f"wrong checksum: host page {page} of {self.handle.name} in layer {layer} "
                f"has {actual:016x}, not {expected:016x}",
                code="wrong_checksum",
            )

    def close(self) -> bool:
        """Drop the views and unmap; see :meth:`SharedSegment.close`. The view is useless afterwards."""
        empty = np.empty((0,), np.uint8)
        self.pages, self.identities, self.checksums = empty, empty, empty.view("<u8")
        return self._segment.close()

    def unlink(self) -> None:
        """Remove the segment's name; only its owner should. Idempotent."""
        self._segment.unlink()


def _check_handle(handle: PoolHandle) -> None:
    if handle.kind != "shm" or handle.layout != "page_first":
        raise TransportError(f"{handle.name} is a {handle.kind} pool with layout {handle.layout}, not a host pool")
    try:
        check_geometry(handle.geometry)
    except ConfigError as error:
        raise TransportError(f"pool {handle.name}: {error.message}") from error
    tables = handle.pages * (DIGEST_BYTES + CHECKSUM_BYTES * handle.geometry.units)
    overlaps = handle.table_offset < handle.pages * handle.geometry.page_bytes
    if (
        handle.pages < 1
        or overlaps
        or handle.table_offset % CHECKSUM_BYTES
        or handle.table_offset + tables > handle.nbytes
    ):
        raise TransportError(
            f"the handle of pool {handle.name} contradicts itself: {handle.pages} pages of "
            f"{handle.geometry.page_bytes} bytes, tables at {handle.table_offset}, {handle.nbytes} bytes in all"
        )
