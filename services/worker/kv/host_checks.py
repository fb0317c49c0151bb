"""Checks of rows of host pages in host memory, in several threads: one thread hashes far less than a link carries.

With a C compiler the threads run C code without the interpreter lock. Without one there is one thread, because xxhash
releases that lock for a megabyte but not for rows of 64 KiB. Rows whose halves are adjacent, as in host pools, are
hashed where they are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from services.worker.kv.page_memory import Bools, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.native.page_rows import can_hash, native_rows

MOST_THREADS = 4
"""Most threads of a worker that hash at a time: the machine's other cores are for the model and the storage."""

PART_BYTES = 2**20
"""Fewest bytes for which a thread is used: it hashes them in 0.1 to 0.2 ms."""


def failed_rows(source: PageMemory, layers: range, pages: PageNumbers, checks: RowChecks) -> Bools:
    """Check ``pages`` where they are; return those that failed, bool [pages]."""
    page_bytes = 2 * source.layout.half_bytes * len(layers)
    return _in_parts(lambda part: _failed(source, layers, pages[part], checks.part(part)), len(pages), page_bytes)


def gather_checked(
    source: PageMemory, staging: PageMemory, layer: int, pages: PageNumbers, checks: RowChecks | None
) -> Bools:
    """Copy ``layer`` of ``pages`` to the first rows of ``staging``, a memory of one layer, and check the copies.

    The bytes that are checked are those that are used. Return which pages are good, bool [pages].
    """
    assert staging.layout.layer_stride == 0
    native, count, half = native_rows(), len(pages), source.layout.half_bytes
    places = np.arange(count, dtype=np.int32)

    def gather(part: slice) -> Bools:
        if native is None:
            staging.host_rows()[part, 0] = source.host_rows()[pages[part], layer]
        else:
            native.move(source, staging, range(layer, layer + 1), pages[part], places[part])
        if checks is None:
            return np.zeros(part.stop - part.start, dtype=bool)
        return _failed(staging, range(1), places[part], checks.part(part))

    return ~_in_parts(gather, count, 2 * half)


def _failed(source: PageMemory, layers: range, pages: PageNumbers, checks: RowChecks) -> Bools:
    """Check pages in this thread; return those that failed, bool [pages]."""
    native = native_rows()
    if native is not None and can_hash(source.layout.half_bytes):
        return native.move_checked(source, None, layers, pages, pages, checks)
    rows, wrong = source.host_rows(), np.zeros(len(pages), dtype=bool)
    for index, page in enumerate(pages.tolist()):
        for at, layer in enumerate(layers):
            row = np.ascontiguousarray(rows[page, layer]).reshape(-1)
            wrong[index] = wrong[index] or not checks.holds(row, index, at)
    return wrong


def _in_parts(check: Callable[[slice], Bools], count: int, page_bytes: int) -> Bools:
    """Run ``check`` over ``count`` pages, divided among the threads where the C code releases the interpreter lock."""
    parts = min(thread_count() if native_rows() is not None else 1, max(1, count * page_bytes // PART_BYTES))
    if parts < 2:
        return check(slice(0, count))
    edges = [count * index // parts for index in range(parts + 1)]
    slices = [slice(start, end) for start, end in pairwise(edges)]
    return np.concatenate(list(_threads().map(check, slices)))


def thread_count() -> int:
    """Return how many threads check: half of the cores that this process may use, at most ``MOST_THREADS``."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count(), thread_name_prefix="checks")
