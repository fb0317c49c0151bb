"""The hotness-aware cuckoo filter (HotPrefix 3.2.1): frequency, clock and depth of prefixes by 64-bit digest.

Buckets of four entries lie one after another, each field in a column of its own: aging is then one vector
operation over one column, and finding a fingerprint is one search for its bytes in a bucket. Columns are bytearrays,
each number in 1, 2, 4 or 8 bytes, because a snapshot holds them as they are, and because in them a single read (for
one byte) and that search cost less than in a numpy array. An entry's key is not kept, only a tag of
``fingerprint_bits + growth_bits`` bits of its hash, so two prefixes with equal tags in one bucket share an entry: the
filter may overstate how hot a prefix is, and forgets none by itself.

The growth bits are what the paper's filter lacks to become larger without its keys. The i-th doubling takes
the i-th of them as one more bit of the bucket's number, and an entry's two buckets differ in the first
``base_bits`` bits only; so every entry goes to the same place in the lower or the upper copy of its bucket, and
nothing is lost, of cached prefixes or of evicted ones. Bits that the number does not use yet tell entries apart:
fewer prefixes share one than ``fingerprint_bits`` promises.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.cache.digests import MULTIPLIER, mix, mix_all

SLOTS = 4  # Entries in a bucket.
LEAST_BASE_BITS = 12  # 16,384 entries, 80 KiB.
MOST_BUCKETS = 64
"""Buckets at most that one insertion searches for an entry to move away."""

_AGED_TOGETHER = 1 << 18
"""Clocks lowered at a time, so that intermediate values fit a cache: twice as fast as all at once."""

_MASK = 2**64 - 1

Digests = NDArray[np.uint64]

SIZES = tuple(next(size for size in (1, 2, 4, 8) if bits <= 8 * size) for bits in range(65))
"""Bytes of a value with that many bits."""

Vector = NDArray[np.unsignedinteger]

_TYPES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class HotnessFilter(msgspec.Struct):
    """The filter's entries in columns, little-endian. Equal histories give equal bytes; nothing is chosen by chance.

    ``base_bits`` is the logarithm of the buckets before any doubling. An entry whose tag is 0 is empty.
    """

    fingerprint_bits: int = 8
    clock_bits: int = 8
    frequency_bits: int = 8
    depth_bits: int = 8
    growth_bits: int = 8
    base_bits: int = LEAST_BASE_BITS
    doublings: int = 0
    occupied: int = 0  # Entries in use.
    ages: int = 0  # Number of times that all clocks were lowered by one so far.
    tags: bytearray = bytearray()
    clocks: bytearray = bytearray()
    frequencies: bytearray = bytearray()
    depths: bytearray = bytearray()

    def __post_init__(self) -> None:
        """Allocate columns of empty entries, unless they are given, as by a snapshot."""
        if not self.tags:
            capacity = self.capacity
            self.tags = bytearray(capacity * SIZES[self.tag_bits])
            self.clocks = bytearray(capacity * SIZES[self.clock_bits])
            self.frequencies = bytearray(capacity * SIZES[self.frequency_bits])
            self.depths = bytearray(capacity * SIZES[self.depth_bits])

    @property
    def tag_bits(self) -> int:
        """Bits that tell entries of one bucket apart, before any doubling."""
        return self.fingerprint_bits + self.growth_bits

    @property
    def capacity(self) -> int:
        """Number of entries, used or empty."""
        return SLOTS << self.base_bits + self.doublings

    @property
    def load_factor(self) -> float:
        """Share of entries in use."""
        return self.occupied / self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return len(self.tags) + len(self.clocks) + len(self.frequencies) + len(self.depths)

    @property
    def max_age(self) -> int:
        """Clock of a prefix that was used since the last aging."""
        return (1 << self.clock_bits) - 1

    def lookup(self, digest: int) -> tuple[int, int]:
        """Return (frequency, clock) of a prefix; (0, 0) when nothing is known."""
        slot = self._slot(digest)
        if slot < 0:
            return 0, 0
        if self.frequency_bits <= 8 and self.clock_bits <= 8:
            return self.frequencies[slot], self.clocks[slot]
        return _read(self.frequencies, self.frequency_bits, slot), _read(self.clocks, self.clock_bits, slot)

    def depth_of(self, digest: int) -> int:
        """Return the depth at which a prefix was last used; 0 when nothing is known."""
        slot = self._slot(digest)
        return 0 if slot < 0 else _read(self.depths, self.depth_bits, slot)

    def touch(self, digest: int, depth: int) -> bool:
        """Note one use of the prefix: its frequency rises by one (a new one begins at 1), its clock to ``max_age``.

        Returns whether the prefix is known now. Where there is no room for a new entry it is not, and nothing has
        changed.
        """
        tag, home, other = self._places(digest)
        slot = self._search(tag, home)
        if slot < 0:
            slot = self._search(tag, other)
        if slot < 0:
            return self._insert(tag, home, other, (1, self.max_age, depth))
        if self.frequency_bits == self.clock_bits == self.depth_bits == 8:  # As below, for the usual widths.
            self.frequencies[slot] += self.frequencies[slot] < 255
            self.clocks[slot] = 255
            self.depths[slot] = depth if depth < 255 else 255
        else:
            self._write(slot, _read(self.frequencies, self.frequency_bits, slot) + 1, self.max_age, depth)
        return True

    def touch_all(self, digests: Digests, depth: int) -> bool:
        """:meth:`touch` each prefix, the first at ``depth`` and each next one deeper by 1; return whether it was done.

        It is not done, and nothing changes, unless all are known under entries of their own and all values have 8 bits.
        """
        if not self.frequency_bits == self.clock_bits == self.depth_bits == 8:
            return False
        slots = self.slots_of(digests)
        if int(slots.min()) < 0 or len(set(slots.tolist())) < len(slots):  # One entry may stand for several.
            return False
        frequencies, depths = vector(self.frequencies, 8), np.arange(depth, depth + len(slots))
        frequencies[slots] += frequencies[slots] < 255
        vector(self.clocks, 8)[slots] = 255
        vector(self.depths, 8)[slots] = np.minimum(depths, 255)
        return True

    def put(self, digest: int, frequency: int, clock: int, depth: int) -> bool:
        """Set the prefix's values, each at most what its width holds.

        Returns whether there was room for it; if not, nothing has changed.
        """
        tag, home, other = self._places(digest)
        slot = self._find(tag, home, other)
        if slot < 0:
            return self._insert(tag, home, other, (frequency, clock, depth))
        self._write(slot, frequency, clock, depth)
        return True

    def age(self) -> None:
        """Lower every clock by one, to 0 at the least (HotPrefix 3.2.2)."""
        clocks = vector(self.clocks, self.clock_bits)
        for start in range(0, len(clocks), _AGED_TOGETHER):
            some = clocks[start : start + _AGED_TOGETHER]
            some -= some != 0
        self.ages += 1

    def grow(self) -> bool:
        """Double the buckets and keep every entry. Return False when the growth bits are used up."""
        if self.doublings == self.growth_bits:
            return False
        tag_bits = self.tag_bits
        goes_up = (vector(self.tags, tag_bits) >> self.doublings) & 1 != 0
        self.tags = _parted(self.tags, tag_bits, goes_up)
        self.clocks = _parted(self.clocks, self.clock_bits, goes_up)
        self.frequencies = _parted(self.frequencies, self.frequency_bits, goes_up)
        self.depths = _parted(self.depths, self.depth_bits, goes_up)
        self.doublings += 1
        return True

    def drop_coldest(self, kept: Digests, amount: int) -> int:
        """Forget up to ``amount`` prefixes that are not among ``kept``; return their number.

        Coldest by frequency x clock (Equation 6), so those whose clock has run down first, then by frequency, then by
        place in the filter.
        """
        is_kept = np.zeros(self.capacity, dtype=bool)
        slots = self.slots_of(kept)
        is_kept[slots[slots >= 0]] = True
        tags = vector(self.tags, self.tag_bits)
        droppable = np.flatnonzero((tags != 0) & ~is_kept)
        frequencies = vector(self.frequencies, self.frequency_bits)
        clocks = vector(self.clocks, self.clock_bits)
        frequency = frequencies[droppable].astype(np.uint64)
        hotness = np.minimum(frequency * clocks[droppable], np.uint64(2**32 - 1))
        gone = droppable[_least(hotness << np.uint64(32) | frequency, amount)]
        for column in (tags, clocks, frequencies, vector(self.depths, self.depth_bits)):
            column[gone] = 0
        self.occupied -= len(gone)
        return len(gone)

    def slots_of(self, digests: Digests) -> NDArray[np.int64]:
        """Return the index of each digest's entry, int64, -1 where nothing is known. Vectorised."""
        tag, home = self._split_hash_all(mix_all(digests))
        other = home ^ np.maximum((tag * np.uint64(MULTIPLIER)) >> np.uint64(64 - self.base_bits), np.uint64(1))
        buckets = vector(self.tags, self.tag_bits).reshape(-1, SLOTS)
        found = np.full(len(digests), -1, dtype=np.int64)
        for bucket in (other, home):
            places = bucket.astype(np.int64)
            matches = buckets[places] == tag[:, None]
            found = np.where(matches.any(axis=1), places * SLOTS + matches.argmax(axis=1), found)
        return found

    def count_entries(self) -> int:
        """Return the correct value of ``occupied``. Reads the whole filter."""
        return int(np.count_nonzero(vector(self.tags, self.tag_bits)))

    # Finding entries.

    def _places(self, digest: int) -> tuple[bytes, int, int]:
        """Return the tag's bytes and the two candidate buckets (Equations 2 to 4, by partial-key hashing)."""
        mixed = mix(digest)
        growth, base = self.growth_bits, self.base_bits
        bits = self.fingerprint_bits + growth
        tag = mixed & ((1 << bits) - 1)
        if not tag >> growth:
            tag += 1 << growth  # A fingerprint of 0 would look empty.
        home = mixed >> (64 - base) | (tag & ((1 << self.doublings) - 1)) << base
        return tag.to_bytes(SIZES[bits], "little"), home, home ^ _shift(tag, base)

    def _split_hash_all(self, mixed: Digests) -> tuple[Digests, Digests]:
        """Return tags and home buckets, as in :meth:`_places`."""
        growth, bits = self.growth_bits, self.tag_bits
        tag = mixed & np.uint64((1 << bits) - 1)
        tag += np.where(tag >> np.uint64(growth) == 0, np.uint64(1 << growth), np.uint64(0))
        upper = (tag & np.uint64((1 << self.doublings) - 1)) << np.uint64(self.base_bits)
        return tag, mixed >> np.uint64(64 - self.base_bits) | upper

    def _slot(self, digest: int) -> int:
        """Return the index of a prefix's entry, or -1."""
        return self._find(*self._places(digest))

    def _find(self, tag: bytes, home: int, other: int) -> int:
        slot = self._search(tag, home)
        return slot if slot >= 0 else self._search(tag, other)

    def _search(self, tag: bytes, bucket: int) -> int:
        """Return the first entry of a bucket with this tag, or -1."""
        size = len(tag)
        start = bucket * SLOTS * size
        end = start + SLOTS * size
        found = self.tags.find(tag, start, end)
        while found >= 0 and found % size:
            found = self.tags.find(tag, found + 1, end)  # It straddled two entries.
        return found // size

    def _insert(self, tag: bytes, home: int, other: int, values: tuple[int, int, int]) -> bool:
        """Write a new entry (frequency, clock, depth) if there is or can be made room for it; return whether."""
        empty = bytes(len(tag))
        slot = self._search(empty, home)
        if slot < 0:
            slot = self._search(empty, other)
        if slot < 0:
            slot = self._kick(home, other)
        if slot < 0:
            return False
        self.tags[slot * len(tag) : (slot + 1) * len(tag)] = tag
        self.occupied += 1
        self._write(slot, *values)
        return True

    def _kick(self, first: int, second: int) -> int:
        """Make room in one of two full buckets and return the freed entry, or -1 when none could be found.

        Nothing moves before the whole chain of moves is known, so a failure changes nothing.
        """
        chain = self._chain(first, second)
        for target, source in pairwise(chain):
            self._move(source, target)
        return chain[-1] if chain else -1

    def _chain(self, first: int, second: int) -> list[int]:
        """Return a chain of moves that frees an entry of the first or second bucket; empty if none is within the bound.

        The list begins with an empty entry; each further entry can move to the place of the one before, and the last is
        in one of the two buckets. It is the shortest chain, found breadth first: no victim is drawn by chance, and no
        entry is in it twice, because no bucket is reached twice.
        """
        reached = [(first, -1, -1), (second, -1, -1)]  # Bucket, the entry that may move there, and from which of these.
        seen = {first, second}
        empty_tag = bytes(SIZES[self.tag_bits])
        position = 0
        while position < len(reached):
            bucket = reached[position][0]
            for slot in range(bucket * SLOTS, bucket * SLOTS + SLOTS):
                tag = _read(self.tags, self.tag_bits, slot)
                alternate = bucket ^ _shift(tag, self.base_bits)
                if alternate in seen:
                    continue
                empty = self._search(empty_tag, alternate)
                if empty >= 0:
                    return [empty, slot, *_way_back(reached, position)]
                if len(reached) < MOST_BUCKETS:
                    seen.add(alternate)
                    reached.append((alternate, slot, position))
            position += 1
        return []

    # Reading and writing entries.

    def _write(self, slot: int, frequency: int, clock: int, depth: int) -> None:
        """Set the values of an entry, each at most what its width holds."""
        _store(self.frequencies, self.frequency_bits, slot, frequency)
        _store(self.clocks, self.clock_bits, slot, clock)
        _store(self.depths, self.depth_bits, slot, depth)

    def _move(self, source: int, target: int) -> None:
        """Copy an entry to an empty place; the source is free to be overwritten."""
        columns = (
            (self.tags, self.tag_bits),
            (self.clocks, self.clock_bits),
            (self.frequencies, self.frequency_bits),
            (self.depths, self.depth_bits),
        )
        for column, bits in columns:
            _store(column, bits, target, _read(column, bits, source))


def _least(keys: NDArray[np.uint64], amount: int) -> NDArray[np.int64]:
    """Return the indices of the ``amount`` least keys, or of all, unordered; among equal keys the first."""
    if amount >= len(keys):
        return np.arange(len(keys))
    if not amount:
        return np.arange(0)
    last = np.partition(keys, amount - 1)[amount - 1]
    below = np.flatnonzero(keys < last)
    return np.concatenate((below, np.flatnonzero(keys == last)[: amount - len(below)]))


def _way_back(reached: list[tuple[int, int, int]], position: int) -> list[int]:
    """Return the entries whose moves led to this bucket, the last one first."""
    _, slot, position = reached[position]
    slots = []
    while slot >= 0:
        slots.append(slot)
        _, slot, position = reached[position]
    return slots


def _shift(tag: int, base_bits: int) -> int:
    """Return the difference (xor) between a tag's two bucket numbers; at least 1, so that there are two."""
    return ((tag * MULTIPLIER) & _MASK) >> (64 - base_bits) or 1


def _read(column: bytearray, bits: int, slot: int) -> int:
    """Return the value of an entry in a column."""
    if bits <= 8:
        return column[slot]
    size = SIZES[bits]
    return int.from_bytes(column[slot * size : (slot + 1) * size], "little")


def _store(column: bytearray, bits: int, slot: int, value: int) -> None:
    """Write a value; one that is too large for its bits is written as the largest."""
    value = min(value, (1 << bits) - 1)
    if bits <= 8:
        column[slot] = value
    else:
        size = SIZES[bits]
        column[slot * size : (slot + 1) * size] = value.to_bytes(size, "little")


def vector(column: bytearray, bits: int) -> Vector:
    """Return the whole column as an array; writes to it change the column."""
    values: Vector = np.frombuffer(column, dtype=_TYPES[SIZES[bits]])
    return values


def _parted(column: bytearray, bits: int, goes_up: NDArray[np.bool_]) -> bytearray:
    """Return a column of twice the length: each value in its lower or upper half, and 0 in the other."""
    doubled = bytearray(2 * len(column))
    values, halves = vector(column, bits), vector(doubled, bits).reshape(2, -1)
    halves[0] = np.where(goes_up, 0, values)
    halves[1] = np.where(goes_up, values, 0)
    return doubled
