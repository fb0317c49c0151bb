"""What is remembered of prefixes that were evicted: a ring of packed rows, the oldest overwritten first.

A ghost costs 60 bytes and its share of two arrays of chains, in memory as in a snapshot; as objects it would cost
six times that. Rows are found by the digest of the prefix, and by the key of the span's beginning.

Where prefixes come back most of the time, nearly all rows are of ghosts that were taken. So whenever the ring comes to
its end and no more than half of it lives, the living move together, in their order, before it grows or goes round.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from services.scheduler.policies.thermo.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROW = Struct("<QQQfIqiHHHBBII")  # As in _pack; then its state, and the next row by digest and by head.
_DIGEST = Struct("<Q")
_LINK = Struct("<I")
_ROWS = np.dtype(
    {
        "names": ["digest", "head", "context", "state", "by_digest", "by_head"],
        "formats": ["<u8", "<u8", "<i8", "u1", "<u4", "<u4"],
        "offsets": [0, 8, 32, 51, 52, 56],
        "itemsize": _ROW.size,
    }
)
"""The same rows, as far as moving and checking them takes."""

_HEAD_AT, _LIVE_AT = 8, 51
_NEXT_BY_DIGEST, _NEXT_BY_HEAD = 52, 56
_NARROW = 2**16 - 1
_NONE = 0  # Links count rows from 1.
_DEAD, _LIVE, _LATEST = range(3)  # States of a row; the latest one under its key is the one found by it.
_LEAST_MOVED = 1024
"""Rows; fewer are not worth it."""


class Ghosts(msgspec.Struct):
    """At most ``limit`` ghosts. ``buckets`` is a power of two."""

    limit: int = 65536
    buckets: int = 32768
    live: int = 0
    at: int = 0  # The row that is written next.
    rows: bytearray = msgspec.field(default_factory=bytearray)
    by_digest: bytearray = msgspec.field(default_factory=bytearray)
    by_head: bytearray = msgspec.field(default_factory=bytearray)

    def __len__(self) -> int:
        return self.live

    def get(self, digest: int) -> Record | None:
        """A copy of the ghost of exactly this prefix."""
        row = self._find(digest)
        return None if row < 0 else self._unpack(row)

    def under(self, head: int) -> Record | None:
        """A copy of the latest ghost whose span begins with what this key stands for."""
        row = self._find_under(head)
        return None if row < 0 else self._unpack(row)

    def put(self, record: Record, head: int) -> Record | None:
        """Remember the record. Returns the one that is overwritten for it, if any."""
        if not self.by_digest:
            self.by_digest, self.by_head = bytearray(4 * self.buckets), bytearray(4 * self.buckets)
        row = self.at * _ROW.size
        overwritten = None
        if row == len(self.rows):
            if self.at >= min(_LEAST_MOVED, self.limit) and 2 * self.live <= self.at:
                self._move_together()
                row = self.at * _ROW.size
            if self.at < self.limit:
                self.rows += bytes(_ROW.size)
            else:
                row = self.at = 0
        if self.rows[row + _LIVE_AT]:
            overwritten = self._unpack(row)
            self._unlink(row)
        earlier = self._find_under(head)
        if earlier >= 0:
            # One row a key, so that chains stay short however many spans begin alike.
            self._leave_chain(self.by_head, self._bucket(head), earlier, _NEXT_BY_HEAD)
            self.rows[earlier + _LIVE_AT] = _LIVE
        by_digest, by_head = self._first(self.by_digest, record.digest), self._first(self.by_head, head)
        _ROW.pack_into(self.rows, row, *_pack(record, head), _LATEST, by_digest, by_head)
        self.at += 1
        _LINK.pack_into(self.by_digest, self._bucket(record.digest), self.at)
        _LINK.pack_into(self.by_head, self._bucket(head), self.at)
        self.live += 1
        return overwritten

    def update(self, record: Record) -> None:
        """Write back what changed of a ghost."""
        row = self._find(record.digest)
        if row >= 0:
            (head,) = _DIGEST.unpack_from(self.rows, row + _HEAD_AT)
            state_and_links = _ROW.unpack_from(self.rows, row)[-3:]
            _ROW.pack_into(self.rows, row, *_pack(record, head), *state_and_links)

    def take(self, digest: int) -> Record | None:
        """Remove a ghost, and return it."""
        row = self._find(digest)
        if row < 0:
            return None
        record = self._unpack(row)
        self._unlink(row)
        return record

    def contexts(self) -> list[int]:
        """Of every ghost the request that it refers to, in no order. Does not mutate."""
        rows = np.frombuffer(self.rows, dtype=_ROWS)
        found: list[int] = rows["context"][rows["state"] != _DEAD].tolist()
        return found

    def _move_together(self) -> None:
        """Drop dead rows; ``at`` is at the end of the ring before and after, so rows are in the order of their age."""
        data = np.frombuffer(self.rows, dtype=np.uint8).reshape(-1, _ROW.size)
        data = data[data[:, _LIVE_AT] != _DEAD]
        rows = data.reshape(-1).view(_ROWS)  # Of copied records numpy would leave out what no field names.
        self.by_digest = self._chained(rows["digest"], rows["by_digest"], np.arange(len(rows)))
        self.by_head = self._chained(rows["head"], rows["by_head"], np.flatnonzero(rows["state"] == _LATEST))
        self.rows = bytearray(data.tobytes())
        self.at = len(rows)

    def _chained(self, keys: NDArray[np.uint64], links: NDArray[np.uint32], members: NDArray[np.intp]) -> bytearray:
        """Chain these rows, the youngest first, by writing their links; returns where each bucket's chain begins."""
        buckets = ((keys[members] ^ keys[members] >> np.uint64(29)) & np.uint64(self.buckets - 1)).astype(np.intp)
        order = np.argsort(buckets, kind="stable")
        buckets, members = buckets[order], members[order]
        older = np.zeros(len(members), dtype=np.uint32)
        older[1:] = np.where(buckets[1:] == buckets[:-1], members[:-1] + 1, _NONE)
        links[:] = _NONE
        links[members] = older
        table = np.zeros(self.buckets, dtype="<u4")
        table[buckets] = members + 1  # Of several in a bucket the last, which is the youngest, stays.
        return bytearray(table.tobytes())

    def _find(self, digest: int) -> int:
        link = self._first(self.by_digest, digest)
        while link != _NONE:
            row = int(link - 1) * _ROW.size
            if _DIGEST.unpack_from(self.rows, row)[0] == digest:
                return row
            link = _LINK.unpack_from(self.rows, row + _NEXT_BY_DIGEST)[0]
        return -1

    def _find_under(self, head: int) -> int:
        link = self._first(self.by_head, head)
        while link != _NONE:
            row = int(link - 1) * _ROW.size
            if _DIGEST.unpack_from(self.rows, row + _HEAD_AT)[0] == head:
                return row
            link = _LINK.unpack_from(self.rows, row + _NEXT_BY_HEAD)[0]
        return -1

    def _bucket(self, key: int) -> int:
        # The digest's low bits depend on the low bits of tokens only; the middle ones on everything.
        return 4 * ((key ^ key >> 29) & (self.buckets - 1))

    def _first(self, table: bytearray, key: int) -> int:
        return int(_LINK.unpack_from(table, self._bucket(key))[0]) if table else _NONE

    def _unlink(self, row: int) -> None:
        digest, head = _ROW.unpack_from(self.rows, row)[:2]
        self._leave_chain(self.by_digest, self._bucket(digest), row, _NEXT_BY_DIGEST)
        if self.rows[row + _LIVE_AT] == _LATEST:
            self._leave_chain(self.by_head, self._bucket(head), row, _NEXT_BY_HEAD)
        self.rows[row + _LIVE_AT] = _DEAD
        self.live -= 1

    def _leave_chain(self, table: bytearray, bucket: int, row: int, link_at: int) -> None:
        wanted, following = row // _ROW.size + 1, _LINK.unpack_from(self.rows, row + link_at)[0]
        holder, place = table, bucket
        while (link := _LINK.unpack_from(holder, place)[0]) != wanted:
            holder, place = self.rows, (link - 1) * _ROW.size + link_at
        _LINK.pack_into(holder, place, following)

    def _unpack(self, row: int) -> Record:
        digest, _, latest, pace, end, context, sample, count, turn, children, passed, *_ = _ROW.unpack_from(
            self.rows, row
        )
        return Record(digest, end, context, count, turn, pace, children, latest, passed, sample)


def _pack(record: Record, head: int) -> tuple[int | float, ...]:
    return (
        record.digest,
        head,
        record.latest,
        record.pace,
        record.end,
        record.context,
        record.sample,
        min(record.count, _NARROW),
        min(record.turn, _NARROW),
        min(record.children, _NARROW),
        record.passed,
    )
