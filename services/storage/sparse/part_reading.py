"""Parts of copies from the disk into the caller's memory, every unit verified first. Blocking: for I/O threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES, ChunkKey, Directories
from services.storage.chunk_sealing import Cipher
from services.storage.sparse.format import SparseHeader, SparseTables
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.read_check import Asked
from services.storage.sparse.read_plan import ChunkRead, region
from services.storage.sparse.verification import UnitCheck, verify_head
from shared.errors import IntegrityError, NotFound, ThermoclineError, TransportError

READ_TIMEOUT_S = 10.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Opened:
    """Header and tables of a copy, verified, and at which row each token is stored, intp [tokens]."""

    header: SparseHeader
    tables: SparseTables
    inverse: npt.NDArray[np.intp]

    @classmethod
    def of(cls, header: SparseHeader, tables: SparseTables) -> Opened:
        """Return both, with the inverse of the mapping."""
        return cls(header, tables, np.argsort(tables.mapping))

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory that it takes."""
        seals = 0 if self.tables.seals is None else self.tables.seals.nbytes
        return self.tables.checksums.nbytes + self.tables.mapping.nbytes + seals + self.inverse.nbytes


@dataclass(frozen=True, slots=True)
class PartFailure:
    """A copy that could not be read, and why.

    ``error`` is IntegrityError when the copy is bad, NotFound when its file is gone, TransportError when the disk
    failed, or KeyMissing.
    """

    key: ChunkKey
    error: ThermoclineError


class HeadReading:
    """Reads header and tables of copies, one after the other, until one fails."""

    def __init__(
        self, backend: Directories, keys: Sequence[ChunkKey], layout: SparseLayout, cipher: Cipher, key_id: str
    ) -> None:
        """Read the heads of ``keys`` when called, in this order; ``opened`` has those that were read.

        A copy that is not sealed with the key ``key_id`` ("" is none) ends the reading as a failure.
        """
        self.opened: dict[ChunkKey, Opened] = {}
        self._backend = backend
        self._keys = keys
        self._layout = layout
        self._cipher = cipher
        self._key_id = key_id

    def __call__(self, buffer: memoryview) -> PartFailure | None:
        """Read them by way of ``buffer``, which begins on a block and has room for a head."""
        nbytes = self._layout.header_bytes(is_sealed=bool(self._key_id))
        head = buffer[:nbytes]
        for key in self._keys:
            try:
                blob_bytes = self._backend.read_ranges(key, [(0, nbytes)], head, first=0, timeout_s=READ_TIMEOUT_S)
                if not blob_bytes:
                    raise NotFound(f"the file of sparse copy {key.path} is gone")
                header, tables = verify_head(
                    head, blob_bytes, key, self._layout, cipher=self._cipher, key_id=self._key_id
                )
                self.opened[key] = Opened.of(header, tables)
            except ThermoclineError as error:
                return PartFailure(key, error)
        return None

    def abandon(self) -> None:
        """See ``disk_tier.ReadParts``."""


class PartReading:
    """Reads parts of copies, one after the other, until one fails; what it wrote by then is of no use."""

    def __init__(
        self, backend: Directories, asked: Asked, reads: Sequence[ChunkRead], opened: Sequence[Opened],
        cipher: Cipher, into: memoryview,
    ) -> None:  # fmt: skip
        """Read rows; ``opened`` belongs to ``asked.keys``, and ``into`` is all of the caller's memory for the call."""
        self._backend = backend
        self._asked = asked
        self._reads = reads
        self._opened = opened
        self._cipher = cipher
        self._into = np.frombuffer(into, np.uint8)
        self._placing = threading.Lock()
        self._is_abandoned = False

    def __call__(self, buffer: memoryview) -> PartFailure | None:
        """Read them by way of ``buffer``, which begins on a block and has ``region_bytes``."""
        for read in self._reads:
            try:
                self._read(read, buffer)
            except ThermoclineError as error:
                return PartFailure(read.key, error)
        return None

    def _read(self, read: ChunkRead, buffer: memoryview) -> None:
        asked, opened = self._asked, self._opened[read.place]
        layout, is_sealed = opened.header.layout, opened.header.is_sealed
        start, nbytes = region(asked, layout, is_sealed=is_sealed)
        first = start // BLOCK_BYTES * BLOCK_BYTES
        blob_bytes = self._backend.read_ranges(read.key, read.ranges, buffer, first=first, timeout_s=READ_TIMEOUT_S)
        if not blob_bytes:
            raise NotFound(f"the file of sparse copy {read.key.path} is gone")
        if blob_bytes != opened.header.blob_bytes:
            raise IntegrityError(f"sparse copy {read.key.path} has {blob_bytes} bytes", code="wrong_layout")
        check = UnitCheck(opened.header, opened.tables, self._cipher)
        for layer in range(asked.layer, asked.layer + asked.layers):
            starts, unit_bytes = layout.units_at(layer, read.units, is_sealed=is_sealed)
            check.verify(buffer, (starts - first).tolist(), unit_bytes, layer, read.units)
        with self._placing:
            if self._is_abandoned:
                raise TransportError("it is not waited for any more")
            self._place(read, np.frombuffer(buffer, np.uint8)[start - first : start - first + nbytes], layout)

    def abandon(self) -> None:
        """See ``disk_tier.ReadParts``: the memory may be another's when this returns."""
        with self._placing:
            self._is_abandoned = True
            self._into = np.empty(0, np.uint8)

    def _place(self, read: ChunkRead, stored: Bytes, layout: SparseLayout) -> None:
        """Copy the rows that were asked for to where the caller wants them."""
        heads, halves = self._asked.heads, self._asked.halves
        chosen = self._asked.tokens.shape[1]
        if not heads:
            (piece,) = read.pieces
            into = self._into.reshape(2, chosen, layout.row_bytes)
            rows = stored.reshape(2, layout.tokens, layout.row_bytes)
            into[:, piece.start : piece.start + len(piece.rows)] = rows[:, piece.rows]
            return
        each = self._into.reshape(self._asked.layers, len(heads), chosen, -1)
        for number, head in enumerate(heads):
            piece = read.pieces[number % len(read.pieces)]  # One for all heads, or one for each.
            of_head = _of_head(stored, head, halves, layout) if halves else self._codes_of(stored, head, layout)
            each[:, number, piece.start : piece.start + len(piece.rows)] = of_head[:, piece.rows]

    def _codes_of(self, stored: Bytes, head: int, layout: SparseLayout) -> Bytes:
        """Return the codes of one head in a region, uint8 [layers, tokens, code_bytes]."""
        layers = self._asked.layers
        start = (head - min(self._asked.heads)) * layout.geometry.layers * layout.probe_unit_bytes
        of_head = stored[start : start + layers * layout.probe_unit_bytes]
        return of_head.reshape(layers, layout.tokens, layout.probe_row_bytes)


def _of_head(stored: Bytes, head: int, halves: tuple[int, ...], layout: SparseLayout) -> Bytes:
    """Return K (or V) of one head in a region, uint8 [1, rows, head_bytes]."""
    rows: Bytes = stored.reshape(2, layout.tokens, layout.geometry.kv_heads, layout.head_bytes)
    return rows[halves[0] : halves[0] + 1, :, head]
