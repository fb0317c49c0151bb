"""Rows moved and checked by C code (``page_rows.c``) without the interpreter lock: the compute thread continues."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from services.worker.kv.page_memory import Bools, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.native.build import NotCompiled, announce_missing, load

MIN_HASHED_BYTES = 241
"""Shorter rows take other branches of XXH3, which the C code lacks."""


class _Move(ctypes.Structure):
    """``move_t``."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("source_page", "source_layer", "source_half")),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("target_page", "target_layer", "target_half", "half_bytes")),
        *((name, ctypes.c_void_p) for name in ("source_pages", "target_pages")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("first_layer", "layers")),
    ]


class NativeRows:
    """The compiled functions; make them with :func:`native_rows`.

    The caller checks that page numbers lie inside the memory; the C code does not.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the functions of ``library``, which is ``page_rows.c`` compiled for this machine."""
        pointer = ctypes.c_void_p
        self._move_rows = library.move_rows
        self._move_rows.argtypes = [ctypes.POINTER(_Move)]
        self._move_rows.restype = None
        self._move_checked = library.move_checked
        self._move_checked.argtypes = [ctypes.POINTER(_Move), *[pointer] * 5]
        self._move_checked.restype = None
        self._hash_row = library.hash_row
        self._hash_row.argtypes = [pointer, ctypes.c_int64, ctypes.c_uint64]
        self._hash_row.restype = ctypes.c_uint64

    def checksum(self, row: npt.NDArray[np.uint8], seed: int) -> int:
        """Return the xxh3_64 of a contiguous row of at least ``MIN_HASHED_BYTES``."""
        return int(self._hash_row(row.ctypes.data, row.nbytes, seed))

    def move(
        self, source: PageMemory, target: PageMemory, layers: range, pages: PageNumbers, target_pages: PageNumbers
    ) -> None:
        """Copy the rows of ``pages`` in ``layers`` to ``target_pages``; both in host memory."""
        pages, target_pages = np.ascontiguousarray(pages), np.ascontiguousarray(target_pages)
        self._move_rows(_describe(source, target, layers, pages, target_pages))

    def move_checked(
        self,
        source: PageMemory,
        target: PageMemory | None,
        layers: range,
        pages: PageNumbers,
        target_pages: PageNumbers,
        checks: RowChecks,
    ) -> Bools:
        """Copy the rows that verify, from the bytes that were verified; without a target only check.

        Return which pages are wrong, bool ``[pages]``: such a page was not written in the layer where it is wrong.
        """
        pages, target_pages = np.ascontiguousarray(pages), np.ascontiguousarray(target_pages)
        expected = np.ascontiguousarray(checks.expected)
        seeds, wanted = checks.seeds(), np.ascontiguousarray(checks.wanted)
        wrong = np.zeros(len(pages), dtype=bool)
        row = np.empty(2 * source.layout.half_bytes, dtype=np.uint8)
        self._move_checked(
            _describe(source, target, layers, pages, target_pages),
            seeds.ctypes.data,
            expected.ctypes.data,
            wanted.ctypes.data,
            wrong.ctypes.data,
            row.ctypes.data,
        )
        return wrong


def can_hash(half_bytes: int) -> bool:
    """Return whether rows of K and V are long enough for the C hash."""
    return 2 * half_bytes >= MIN_HASHED_BYTES


@functools.cache
def native_rows() -> NativeRows | None:
    """Return the functions, compiled and proven equal to xxhash here; None, announced, where that fails."""
    try:
        made = NativeRows(load("page_rows", (), {}, {"move_t": _Move}))
    except NotCompiled:
        return None
    if not _agrees(made, (MIN_HASHED_BYTES, 256, 1024, 1025, 4096, 65_536)):
        announce_missing("page_rows", "its checksums differ from xxhash's")
        return None
    return made


def _agrees(made: NativeRows, sizes: Sequence[int]) -> bool:
    data = (np.arange(max(sizes), dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 56).astype(np.uint8)
    seeds = (0, 1, 0xFEDCBA9876543210)
    return all(
        made.checksum(data[:size], seed) == xxhash.xxh3_64_intdigest(data[:size].data, seed=seed)
        for size in sizes
        for seed in seeds
    )


def _describe(
    source: PageMemory, target: PageMemory | None, layers: range, pages: PageNumbers, target_pages: PageNumbers
) -> _Move:
    assert source.array is not None
    assert layers.step == 1
    begin, end = source.layout, (target or source).layout
    address = None
    if target is not None:
        assert target.array is not None
        assert target.array.flags.writeable
        address = target.array.ctypes.data
    return _Move(
        source.array.ctypes.data, begin.page_stride, begin.layer_stride, begin.half_stride,
        address, end.page_stride, end.layer_stride, end.half_stride, begin.half_bytes,
        pages.ctypes.data, target_pages.ctypes.data, len(pages), layers.start, len(layers),
    )  # fmt: skip
