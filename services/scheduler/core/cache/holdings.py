"""Fields of nodes in few bytes: names, counts and depths that nodes share, and a record of digests and pages.

Most nodes hold nothing, or the same as many others: names of pools, and counts of one, are the same object in all.

Each node has one record, a single ``bytes``: its two digests and its page numbers in every pool that holds it. Two
digests as ints take 96 bytes, here they take 16. Consecutive pages, which pages allocated together nearly always are,
are written as the first of them; where that is so in every pool that holds the node, three bytes at the end give their
number. No list of whole page numbers has such a length, so the length tells the two forms apart.

A record is digest and end digest (uint64), then for each pool either all of its page numbers (int32), or its first one,
and then their number (uint24). All little-endian.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

_MOST_SHARED = 4096
"""Shared values at most; those not used lately are made again."""


class _Shared(dict[Any, Any]):
    """A dictionary that refuses changes."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("this dictionary is shared by nodes; give the node another one (see with_count)")

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = __ior__ = _refuse  # type: ignore[assignment]


EMPTY_MAP: dict[Any, Any] = _Shared()
"""Stands for empty counts. A million nodes with an empty dictionary each are 64 MB."""


@lru_cache(maxsize=_MOST_SHARED)
def counted_once(name: str) -> dict[str, int]:
    """Return the shared dictionary that counts one of this name."""
    return _Shared({name: 1})


@lru_cache(maxsize=_MOST_SHARED)
def counted(name: str, count: int) -> dict[str, int]:
    """Return the shared dictionary that counts ``count`` (at least 1) of a name, for nodes counted together."""
    return counted_once(name) if count == 1 else _Shared({name: count})


@lru_cache(maxsize=_MOST_SHARED)
def shared_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return an equal tuple, the same object for all callers."""
    return names


@lru_cache(maxsize=1 << 16)
def shared_depth(depth: int) -> int:
    """Return an equal number, the same object for all callers. There are no more depths than pages in a context."""
    return depth


def with_count(held: dict[str, int], name: str, count: int) -> dict[str, int]:
    """Return the dictionary with this count, at least 1, of a name. A shared one is replaced, not changed."""
    if count == 1 and (not held or (len(held) == 1 and name in held)):
        return counted_once(name)
    if type(held) is _Shared:
        held = dict(held)
    held[name] = count
    return held


def shared_count(held: dict[str, int]) -> dict[str, int]:
    """Return the shared dictionary in place of one with a single name whose count is 1; otherwise ``held``."""
    ((name, count),) = held.items()
    return counted_once(name) if count == 1 else held


def without_count(held: dict[str, int], name: str) -> dict[str, int]:
    """Return the dictionary less a name, which it must have. An emptied one is replaced by :data:`EMPTY_MAP`."""
    if len(held) == 1 and name in held:
        return EMPTY_MAP
    if type(held) is _Shared:
        held = dict(held)
    del held[name]
    return held


def copied(held: dict[str, int]) -> dict[str, int]:
    """Return a dictionary with the same counts that another node may hold: the same one where it is shared."""
    return held if type(held) is _Shared else dict(held)


DIGESTS_BYTES = 16
DIGEST_BYTES = 8  # Bytes of a record's first digest.
LEAST_RUN = 4
"""Consecutive pages from which on a run is written as such."""

_NUMBER = 4  # Bytes of a page number,
_COUNT = 3  # and of how many there are.
_LONGEST_RUN = 1 << 8 * _COUNT
_DIGESTS = Struct("<QQ")
_unpack_number = Struct("<I").unpack_from

written = _DIGESTS.pack
"""Return the record of a node that no pool holds, from its digest and its end digest."""

NO_DIGESTS = written(0, 0)
_LEAST_TABULATED, _MOST_TABULATED = 1 << 10, 1 << 20  # At most 4 MiB.


class _Table:
    """Numbers from 0 on, packed: slicing a run from it takes a fifth of the time that numpy takes to make one."""

    def __init__(self) -> None:
        self.numbers = b""

    def reach(self, page: int) -> None:
        """Hold all page numbers below ``page``, which is at most _MOST_TABULATED."""
        size = min(_MOST_TABULATED, max(_LEAST_TABULATED, 1 << page.bit_length()))
        self.numbers = np.arange(size, dtype="<i4").tobytes()


_table = _Table()


def run_of(first: int, count: int) -> bytes:
    """Return ``count`` page numbers from ``first`` (not negative) on, packed little-endian int32."""
    start, end = _NUMBER * first, _NUMBER * (first + count)
    if end > len(_table.numbers):
        if first + count > _MOST_TABULATED:
            return np.arange(first, first + count, dtype="<i4").tobytes()
        _table.reach(first + count)
    return _table.numbers[start:end]


def digests_of(record: bytes) -> tuple[int, int]:
    """Return a record's digest and end digest."""
    digest, end_digest = _DIGESTS.unpack_from(record)
    return digest, end_digest


def listed(record: bytes, pools: int, place: int) -> bytes:
    """Return the packed page numbers (int32) of the pool at ``place`` among the ``pools`` that hold the node."""
    if len(record) & 3:
        return run_at(record, place)
    each = (len(record) - DIGESTS_BYTES) // pools
    start = DIGESTS_BYTES + place * each
    return record[start : start + each]


def run_at(record: bytes, place: int) -> bytes:
    """Return the packed page numbers of the pool at ``place`` from a record of runs."""
    (first,) = _unpack_number(record, DIGESTS_BYTES + _NUMBER * place)
    (count,) = _unpack_number(record, len(record) - _NUMBER)
    return run_of(first, count >> 8)


def runs_at(records: list[bytes], place: int, begins: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[int]]:
    """Return the page numbers (int32) of the pool at ``place`` from many records of runs, concatenated.

    ``begins`` has the offset at which each record's pages begin, and the total at the end. The second result lists the
    records that are not of runs: the caller fills in their page numbers.
    """
    sizes = np.fromiter(map(len, records), np.int64, len(records))
    starts = np.cumsum(sizes) - sizes + (DIGESTS_BYTES + _NUMBER * place)
    table = np.frombuffer(b"".join(records), np.uint8)
    # A record without a pool has nothing behind its digests, but it is no record of runs, and what is read is not used.
    first = table[np.minimum(starts[:, None] + np.arange(_NUMBER), len(table) - 1)].view("<u4")[:, 0]
    pages = np.repeat(first - begins[:-1], np.diff(begins))
    pages += np.arange(len(pages))
    return pages.astype("<i4"), np.flatnonzero(sizes & 3 == 0).tolist()


def inserted(record: bytes, pools: int, place: int, pages: bytes) -> bytes:
    """Return the record with the page numbers of one more pool, inserted at ``place``; all pools have equally many."""
    count = len(pages) // _NUMBER
    if not pools:
        return record + (_as_run(pages, count) or pages)
    if len(record) & 3:
        start = DIGESTS_BYTES + _NUMBER * place
        if _is_run(pages, count):
            return record[:start] + pages[:_NUMBER] + record[start:]
        record = _spelled(record, pools)
    start = DIGESTS_BYTES + place * len(pages)
    return record[:start] + pages + record[start:]


def taken(record: bytes, pools: int, place: int) -> bytes:
    """Return the record without the pool at ``place``; ``pools`` hold the node before."""
    if pools == 1:
        return record[:DIGESTS_BYTES]
    size = len(record) - DIGESTS_BYTES
    each = _NUMBER if size & 3 else size // pools
    start = DIGESTS_BYTES + place * each
    record = record[:start] + record[start + each :]
    if not size & 3 and _as_run(listed(record, pools - 1, 0), each // _NUMBER):
        return with_lists(record, lists_of(record, pools - 1))  # All remaining lists may be runs.
    return record


def lists_of(record: bytes, pools: int) -> list[bytes]:
    """Return the packed page numbers (int32) of every pool that holds the node, in the order of their places."""
    return [listed(record, pools, place) for place in range(pools)]


def with_lists(digests: bytes, lists: list[bytes]) -> bytes:
    """Return the record with these digests and one list of packed page numbers for each pool."""
    record = digests[:DIGESTS_BYTES]
    for place, pages in enumerate(lists):
        record = inserted(record, place, place, pages)
    return record


def _is_run(pages: bytes, count: int) -> bool:
    return pages == run_of(_unpack_number(pages)[0], count)


def _as_run(pages: bytes, count: int) -> bytes:
    """Return the pages in the form of a run; b"" where they are not consecutive, or fewer than LEAST_RUN."""
    if not LEAST_RUN <= count < _LONGEST_RUN or not _is_run(pages, count):
        return b""
    return pages[:_NUMBER] + count.to_bytes(_COUNT, "little")


def _spelled(record: bytes, pools: int) -> bytes:
    return record[:DIGESTS_BYTES] + b"".join(lists_of(record, pools))
