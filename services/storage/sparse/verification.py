"""What sparse copies must stand before anything of them is used, whole or in part. Blocking: for I/O threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from services.storage.backends import ChunkKey
from services.storage.chunk_format import is_zero
from services.storage.chunk_sealing import Cipher
from services.storage.sparse.format import SparseHeader, SparseTables, check, check_hidden, read_head, unpack_tables
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import gaps
from services.storage.sparse.unit_sealing import UnitSealing, open_tables
from shared.errors import IntegrityError


def verify_head(
    head: memoryview, nbytes: int, key: ChunkKey, layout: SparseLayout, *, cipher: Cipher, key_id: str
) -> tuple[SparseHeader, SparseTables]:
    """Show that ``head``, the first bytes of a copy of ``nbytes`` bytes, begins the copy ``key``; its tables, opened.

    ``key_id`` is whose key the caller may use: a copy that is sealed with another, or not sealed although there is a
    key, is refused as ``wrong_key``. Raises IntegrityError with a code of ``format``, or KeyMissing.
    """
    header, body = read_head(head, nbytes)
    check(header, key, layout)
    if header.key_id != key_id:
        raise IntegrityError(
            f"sparse copy {header.identity.hex()} is sealed with key {header.key_id or 'none'}, not {key_id or 'none'}",
            code="wrong_key",
        )
    check_hidden(header, key, cipher)
    return header, unpack_tables(open_tables(body, header, cipher), layout, is_sealed=header.is_sealed)


class UnitCheck:
    """Shows of units of one copy that they are what was written."""

    def __init__(self, header: SparseHeader, tables: SparseTables, cipher: Cipher) -> None:
        """Check units of the copy with this ``header`` against its ``tables``; ``cipher`` opens sealed ones."""
        self._header = header
        self._tables = tables
        self._sealing = UnitSealing(header, cipher) if header.is_sealed else None

    def verify(
        self, stored: memoryview, starts: Sequence[int], nbytes: int, layer: int, numbers: npt.NDArray[np.intp]
    ) -> None:
        """Verify units of ``nbytes`` bytes of a layer, and open them where they are.

        They begin at ``starts`` of ``stored``. Raises IntegrityError (``wrong_checksum``, ``wrong_key``), or
        KeyMissing.
        """
        units, digest = [stored[start : start + nbytes] for start in starts], xxhash.xxh3_64_intdigest
        found, expected = np.array([digest(unit) for unit in units], np.uint64), self._tables.checksums[layer, numbers]
        for index in np.flatnonzero(found != expected)[:1]:
            raise IntegrityError(
                f"wrong checksum: unit {numbers[index]} of layer {layer} of sparse copy {self._header.identity.hex()} "
                f"has {found[index]:016x}, not {expected[index]:016x}",
                code="wrong_checksum",
            )
        if self._sealing is not None and self._tables.seals is not None:
            for unit, number in zip(units, numbers.tolist(), strict=True):
                self._sealing.open(unit, self._tables.seals[layer, number].tobytes(), layer, number)


def verify_copy(
    blob: memoryview, key: ChunkKey, layout: SparseLayout, *, cipher: Cipher, key_id: str
) -> tuple[SparseHeader, SparseTables]:
    """Show that ``blob`` (ending where the copy ends) is the whole and unharmed copy ``key``, and open its units.

    Raises as :func:`verify_head` and :meth:`UnitCheck.verify` do.
    """
    header, tables = verify_head(blob, blob.nbytes, key, layout, cipher=cipher, key_id=key_id)
    check_units = UnitCheck(header, tables, cipher)
    probes, blocks = np.split(np.arange(layout.units), [layout.probe_heads])
    for layer in range(layout.geometry.layers):
        for numbers in (probes, blocks):
            starts, nbytes = layout.units_at(layer, numbers, is_sealed=header.is_sealed)
            check_units.verify(blob, starts.tolist(), nbytes, layer, numbers)
    if not all(is_zero(blob[start:end]) for start, end in gaps(header)):
        raise IntegrityError(f"sparse copy {header.identity.hex()} is not filled up with zeros", code="wrong_checksum")
    return header, tables
