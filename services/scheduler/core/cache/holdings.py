"""What nodes hold, in few bytes: names, counts and depths that nodes share, and a record of digests and pages.

Most nodes hold nothing, or what many others hold too: names of pools, and counts of one, are the same object in all.

The record is what every node has, in one ``bytes``: its two digests and the numbers of its pages in all pools that hold
it. Two digests as numbers of their own take 96 bytes, in front of the page numbers they take 16. Pages that follow one
another, as nearly all do that were allocated together, are written as the first of them; where that is so in every
pool that holds the node, three bytes at the end say how many there are. No list of whole page numbers has such a
length, so the length tells the two forms apart.

A record is digest and end digest (uint64), then for each pool either all of its page numbers (int32), or its first
one, and then their number (uint24). All little-endian.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

_MOST_SHARED = 4096
"""Values that are shared at the most; those that were not asked for lately are made again."""


class _Shared(dict[Any, Any]):
    """A dictionary that stays as it is."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("this dictionary is shared by nodes; give the node another one (see with_count)")

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = __ior__ = _refuse  # type: ignore[assignment]


EMPTY_MAP: dict[Any, Any] = _Shared()
"""What a node holds where it counts nothing. A million nodes with an empty dictionary each are 64 MB."""


@lru_cache(maxsize=_MOST_SHARED)
def counted_once(name: str) -> dict[str, int]:
    """Return the shared dictionary that counts one of this name."""
    return _Shared({name: 1})


@lru_cache(maxsize=_MOST_SHARED)
def counted(name: str, count: int) -> dict[str, int]:
    """Return the shared dictionary that counts so many of this name, at least 1, for nodes that are counted
    together.
    """
    return counted_once(name) if count == 1 else _Shared({name: count})


@lru_cache(maxsize=_MOST_SHARED)
def shared_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return an equal tuple, the same one for all callers."""
    return names


@lru_cache(maxsize=1 << 16)
def shared_depth(depth: int) -> int:
    """Return an equal number, the same one for all callers. There are no more depths than pages in a context."""
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
    """Return the shared dictionary in place of one with a single name, where that is counted once."""
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
DIGEST_BYTES = 8  # Of a record's first digest.
LEAST_RUN = 4
"""Pages from which on a run is written as such."""

_NUMBER = 4  # Bytes of a page number,
_COUNT = 3  # and of how many there are.
_LONGEST_RUN = 1 << 8 * _COUNT
_DIGESTS = Struct("<QQ")
_unpack_number = Struct("<I").unpack_from

written = _DIGESTS.pack
"""The record of a node, by its digest and its end digest, that no pool holds."""

NO_DIGESTS = written(0, 0)
_LEAST_TABULATED, _MOST_TABULATED = 1 << 10, 1 << 20  # At most 4 MiB.


class _Table:
    """Numbers from 0 on, packed: a run is a part of them, for a fifth of the time that numpy takes to make it."""

    def __init__(self) -> None:
        self.numbers = b""

    def reach(self, page: int) -> None:
        """Have all pages below this one, which is at most _MOST_TABULATED."""
        size = min(_MOST_TABULATED, max(_LEAST_TABULATED, 1 << page.bit_length()))
        self.numbers = np.arange(size, dtype="<i4").tobytes()


_table = _Table()


def run_of(first: int, count: int) -> bytes:
    """Packed little-endian int32 page numbers, ``count`` of them from ``first`` on, which is not negative."""
    start, end = _NUMBER * first, _NUMBER * (first + count)
    if end > len(_table.numbers):
        if first + count > _MOST_TABULATED:
            return np.arange(first, first + count, dtype="<i4").tobytes()
        _table.reach(first + count)
    return _table.numbers[start:end]


def digests_of(record: bytes) -> tuple[int, int]:
    """Return the digest and the end digest."""
    digest, end_digest = _DIGESTS.unpack_from(record)
    return digest, end_digest


def listed(record: bytes, pools: int, place: int) -> bytes:
    """Packed page numbers in one of the pools that hold the node."""
    if len(record) & 3:
        return run_at(record, place)
    each = (len(record) - DIGESTS_BYTES) // pools
    start = DIGESTS_BYTES + place * each
    return record[start : start + each]


def run_at(record: bytes, place: int) -> bytes:
    """Return the same from a record of runs, which is longer than any list of page numbers."""
    (first,) = _unpack_number(record, DIGESTS_BYTES + _NUMBER * place)
    (count,) = _unpack_number(record, len(record) - _NUMBER)
    return run_of(first, count >> 8)


def runs_at(records: list[bytes], place: int, begins: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[int]]:
    """Return the same for many records, one behind the other; each begins at its ``begins``, which has their end, too.

    Also places of records that are none of runs: their page numbers are for the caller to fill in.
    """
    sizes = np.fromiter(map(len, records), np.int64, len(records))
    starts = np.cumsum(sizes) - sizes + (DIGESTS_BYTES + _NUMBER * place)
    table = np.frombuffer(b"".join(records), np.uint8)
    # Of a record without a pool there is nothing behind, but then it is none of runs, and what is read is not used.
    first = table[np.minimum(starts[:, None] + np.arange(_NUMBER), len(table) - 1)].view("<u4")[:, 0]
    pages = np.repeat(first - begins[:-1], np.diff(begins))
    pages += np.arange(len(pages))
    return pages.astype("<i4"), np.flatnonzero(sizes & 3 == 0).tolist()


def inserted(record: bytes, pools: int, place: int, pages: bytes) -> bytes:
    """Return the record with the numbers in one more pool, which comes to this place; as many as in each of the
    others.
    """
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
    """Return the record without one of the pools that hold the node."""
    if pools == 1:
        return record[:DIGESTS_BYTES]
    size = len(record) - DIGESTS_BYTES
    each = _NUMBER if size & 3 else size // pools
    start = DIGESTS_BYTES + place * each
    record = record[:start] + record[start + each :]
    if not size & 3 and _as_run(listed(record, pools - 1, 0), each // _NUMBER):
        return with_lists(record, lists_of(record, pools - 1))  # All that are left may be runs.
    return record


def lists_of(record: bytes, pools: int) -> list[bytes]:
    """Packed page numbers in every pool that holds the node, in the order of their places."""
    return [listed(record, pools, place) for place in range(pools)]


def with_lists(digests: bytes, lists: list[bytes]) -> bytes:
    """Return the record of a node with these digests that so many pools hold."""
    record = digests[:DIGESTS_BYTES]
    for place, pages in enumerate(lists):
        record = inserted(record, place, place, pages)
    return record


def _is_run(pages: bytes, count: int) -> bool:
    return pages == run_of(_unpack_number(pages)[0], count)


def _as_run(pages: bytes, count: int) -> bytes:
    """Return the form of a run, or nothing where these pages are none, or too few."""
    if not LEAST_RUN <= count < _LONGEST_RUN or not _is_run(pages, count):
        return b""
    return pages[:_NUMBER] + count.to_bytes(_COUNT, "little")


def _spelled(record: bytes, pools: int) -> bytes:
    return record[:DIGESTS_BYTES] + b"".join(lists_of(record, pools))
