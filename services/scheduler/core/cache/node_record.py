"""What every node has, in one ``bytes``: its two digests and the numbers of its pages in all pools that hold it.

Two digests as numbers of their own take 96 bytes, in front of the page numbers they take 16. Pages that follow one
another, as nearly all do that were allocated together, are written as the first of them; where that is so in every
pool that holds the node, three bytes at the end say how many there are. No list of whole page numbers has such a
length, so the length tells the two forms apart.

A record is digest and end digest (uint64), then for each pool either all of its page numbers (int32), or its first
one, and then their number (uint24). All little-endian.
"""

from __future__ import annotations

from struct import Struct

from services.scheduler.core.cache.page_runs import run_of

DIGESTS_BYTES = 16
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


def digests_of(record: bytes) -> tuple[int, int]:
    """The digest and the end digest."""
    digest, end_digest = _DIGESTS.unpack_from(record)
    return digest, end_digest


def digest_bytes(record: bytes) -> bytes:
    """The digest alone, as uint64."""
    return record[:8]


def listed(record: bytes, pools: int, place: int) -> bytes:
    """Packed page numbers in one of the pools that hold the node."""
    if len(record) & 3:
        return run_at(record, place)
    each = (len(record) - DIGESTS_BYTES) // pools
    start = DIGESTS_BYTES + place * each
    return record[start : start + each]


def run_at(record: bytes, place: int) -> bytes:
    """The same of a record of runs, which no list of page numbers is as long as."""
    (first,) = _unpack_number(record, DIGESTS_BYTES + _NUMBER * place)
    (count,) = _unpack_number(record, len(record) - _NUMBER)
    return run_of(first, count >> 8)


def inserted(record: bytes, pools: int, place: int, pages: bytes) -> bytes:
    """The record with the numbers in one more pool, which comes to this place; as many as in each of the others."""
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
    """The record without one of the pools that hold the node."""
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
    """The record of a node with these digests that so many pools hold."""
    record = digests[:DIGESTS_BYTES]
    for place, pages in enumerate(lists):
        record = inserted(record, place, place, pages)
    return record


def _is_run(pages: bytes, count: int) -> bool:
    return pages == run_of(_unpack_number(pages)[0], count)


def _as_run(pages: bytes, count: int) -> bytes:
    """The form of a run, or nothing where these pages are none, or too few."""
    if not LEAST_RUN <= count < _LONGEST_RUN or not _is_run(pages, count):
        return b""
    return pages[:_NUMBER] + count.to_bytes(_COUNT, "little")


def _spelled(record: bytes, pools: int) -> bytes:
    return record[:DIGESTS_BYTES] + b"".join(lists_of(record, pools))
