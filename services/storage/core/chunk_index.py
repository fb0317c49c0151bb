"""The chunks on the disk, within its quota, and their order of eviction.

``chunk_worth`` defines the worth of a chunk; the least worth **per byte** is evicted first, as far as the cost of
losing it allows. KV of a prefix is of no use without everything above it. So only a chunk that no other chunk
continues, on the disk or arriving there, may be evicted; ties go to the deeper, and chunks that are being read or are
pinned stay. Where a chunk was lost all the same, because its file was damaged, the chunks behind it are **cut off**,
and are evicted before everything else; they count again once the chunk is there again, in whatever form.

A directory may be **away** for a while: its chunks are not there, but stay in the order and count, so that the chunks
that continue them are kept for their return. A chunk that is evicted meanwhile is forgotten, and its file, like every
file that cannot be deleted, is **left over**: its bytes count until it is gone.

An owner of namespaces may have a quota of its own (:mod:`chunk_owners`). Room within it is made by its own chunks, by
the same rule, before a chunk of it evicts any other; and chunks above a quota are evicted before everything else.

Every operation takes O(log n), amortised: the heap is lazy, and an outdated entry is dropped when it comes up, or at
once when outdated entries outweigh the valid ones. The index takes about 700 bytes a chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, log2

from services.storage.backends import UNKNOWN, ChunkEntry, ChunkKey
from services.storage.core.chunk_links import ChunkLinks
from services.storage.core.chunk_owners import ChunkOwner, ChunkOwners, Entry
from services.storage.core.chunk_reach import ChunkReach
from services.storage.core.chunk_worth import first_heat, heat_after_use, heat_again, heat_left
from services.storage.core.left_over import LeftOver
from shared.errors import InvariantViolated

MAX_PINS = 2**20  # Names.

_SLACK = 64  # Most outdated entries of a small heap.

_ANY = (inf, 0)
"""A bound above the rank of every chunk."""


@dataclass(slots=True)
class _Chunk:
    key: ChunkKey
    nbytes: int
    heat: float  # log2 of its worth at time 0.
    number: int  # Number of its valid entry in the heap; entries with other numbers are outdated.
    place: int = UNKNOWN
    parent: bytes = b""  # Name of the chunk before it; "" is the root, or unknown.
    uses: int = 0
    readers: int = 0
    is_listed: bool = False  # Whether it has a valid entry in the heap, and in that of its owner.
    is_cut_off: bool = False  # Whether a chunk that it continues was lost.
    search: int = 0  # Number of the search that found it; 0 for saved chunks.
    away: str = ""  # Its directory, while that is away.
    owner: ChunkOwner | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Answer to :meth:`ChunkIndex.reserve`: the evicted chunks, and whether there is room now."""

    victims: tuple[ChunkKey, ...]
    is_granted: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk in flight to the disk. ``place`` counts chunks from the root, ``parent`` is the chunk before it."""

    key: ChunkKey
    nbytes: int
    place: int
    parent: ChunkKey | None
    value: float = 0.0


def _is_valid(entry: Entry, chunk: _Chunk) -> bool:
    return chunk.is_listed and chunk.number == entry[2]


def _name(key: ChunkKey) -> bytes:
    # The identity stands for the namespace too.
    return key.identity + key.geometry


class ChunkIndex:
    """The chunks on the disk and those arriving, within a quota. Times are seconds of one clock."""

    def __init__(self, quota: int) -> None:
        """Begin with no chunks; ``quota``, in bytes, bounds what is on the disk, arriving or left over."""
        self.quota = quota
        self.nbytes = 0  # Bytes on the disk.
        self.reserved = 0  # Bytes arriving.
        self.evicted = 0  # Chunks evicted since the start.
        self._chunks: dict[bytes, _Chunk] = {}
        self._arrivals: dict[bytes, Arrival] = {}
        self._links = ChunkLinks()  # From chunks, present or arriving, to those they continue.
        self._reach = ChunkReach(self._chunks, self._arrivals, self._links)
        self._left_over = LeftOver()
        self._search = 0  # Number of the last search.
        self._is_searching = False
        self._held_back: list[bytes] = []  # Chunks that may not be evicted before it is over.
        self._pins: dict[bytes, None] = {}
        self._heap: list[Entry] = []
        self._owners = ChunkOwners()
        self._numbers = 0

    def __len__(self) -> int:
        """Return the number of chunks, those in a directory that is away included."""
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        """Return whether a chunk is on the disk, in a directory that is not away."""
        chunk = self._chunks.get(_name(key))
        return chunk is not None and not chunk.away

    @property
    def used(self) -> int:
        """Bytes of the quota that are taken."""
        return self.nbytes + self.reserved + self._left_over.nbytes

    @property
    def pinned(self) -> int:
        """Number of pinned names, whether their chunks are there or not."""
        return len(self._pins)

    def keys(self, *, namespace: str = "", geometry: bytes = b"") -> list[ChunkKey]:
        """List the present chunks, in order of arrival, of a namespace and of a geometry (empty is all). O(n)."""
        return [
            chunk.key
            for chunk in self._chunks.values()
            if not chunk.away
            and (not namespace or chunk.key.namespace == namespace)
            and (not geometry or chunk.key.geometry == geometry)
        ]

    def heats(self) -> Callable[[float], dict[ChunkKey, float]]:
        """Return a function that computes the chunks' ``ChunkEntry.heat`` at a time (seconds), for another thread."""
        chunks = list(self._chunks.values())
        return lambda now_s: {chunk.key: heat_left(chunk.heat, now_s) for chunk in chunks}

    def holds(self, geometry: bytes) -> bool:
        """Return whether there is any chunk of a geometry, given by its digest. O(n) where there is none."""
        return any(chunk.key.geometry == geometry for chunk in self._chunks.values())

    def nbytes_of(self, key: ChunkKey) -> int:
        """Return the bytes of a chunk that is there; 0 for any other."""
        chunk = self._chunks.get(_name(key))
        return 0 if chunk is None else chunk.nbytes

    def owned_bytes(self, most: int) -> dict[str, int]:
        """Return the bytes on the disk by owner, for at most ``most`` owners; "" has all the rest."""
        found = self._owners.nbytes(most)
        return {"": self.nbytes - sum(found.values()), **found}

    def is_arriving(self, key: ChunkKey) -> bool:
        """Return whether the chunk is reserved and neither added nor given up."""
        return _name(key) in self._arrivals

    def search(self) -> None:
        """Begin a search for chunks on the disk. Until :meth:`searched` found chunks may not be evicted.

        A chunk that continues one of them may not have been found yet.
        """
        self._search += 1
        self._is_searching = True

    def searched(self) -> None:
        """End the search: everything was found."""
        self._is_searching = False
        held_back, self._held_back = self._held_back, []
        for name in held_back:
            if name in self._chunks:
                self._list(name, self._chunks[name])

    def found(self, entry: ChunkEntry, now_s: float) -> bool:
        """Add a chunk that is on the disk. Found chunks may exceed the quota: see :meth:`shrink`.

        Return False if it was evicted while it could not be deleted: its file is still left over.
        """
        name, above = _name(entry.key), _name(entry.parent) if entry.parent else b""
        known = self._chunks.get(name)
        if name in self._left_over and known is None:
            self.leave_over(entry.key, entry.nbytes)
            return False
        if known is not None:
            known.away = ""
        elif name not in self._arrivals:
            self._links.add(above, name)
            heat = first_heat(0.0, now_s) if entry.heat is None else heat_again(entry.heat, now_s)
            chunk = _Chunk(entry.key, entry.nbytes, heat, 0, entry.place, above)
            chunk.search, chunk.is_cut_off = self._search, not self._reach.is_reached(above)
            self._insert(name, chunk)
        return True

    def leave(self, keys: Iterable[ChunkKey], directory: str) -> list[ChunkKey]:
        """Mark a directory as away, with these chunks in it; return those that were there."""
        chunks = [chunk for key in keys if (chunk := self._chunks.get(_name(key))) is not None and not chunk.away]
        for chunk in chunks:
            chunk.away = directory
        return [chunk.key for chunk in chunks]

    def returned(self, directory: str) -> None:
        """Take back a directory with the chunks found in it; those not found are removed. O(n)."""
        for name in [name for name, chunk in self._chunks.items() if chunk.away == directory]:
            self._remove(name)
        self._left_over.clear(directory)

    def leave_over(self, key: ChunkKey, nbytes: int, directory: str = "") -> None:
        """Count the bytes of a file that could not be deleted, though its chunk is not there."""
        self._left_over.add(_name(key), nbytes, directory)

    def cleared(self, key: ChunkKey) -> None:
        """Stop counting a left-over file of this name."""
        self._left_over.remove(_name(key))

    def reserve(self, arrival: Arrival, now_s: float) -> Room:
        """Make room for a chunk by evicting chunks of less worth; they stay evicted even if the room is not enough.

        Raises InvariantViolated for a chunk that is there or arriving.
        """
        name = _name(arrival.key)
        if arrival.key in self or name in self._arrivals:
            raise InvariantViolated(f"chunk {arrival.key.path} is on the disk or on its way already")
        if arrival.nbytes + self.reserved > self.quota:
            return Room((), False)
        above = _name(arrival.parent) if arrival.parent else b""
        if name in self._chunks:
            self._abandon(name)  # The new copy replaces the one that is away.
        # From here on its parent counts as continued: the chunk must not evict the chunks it needs.
        self._links.add(above, name)
        rank = (first_heat(arrival.value, now_s) - log2(arrival.nbytes), -arrival.place)
        owner = self._owners.of(arrival.key.namespace)
        victims: tuple[ChunkKey, ...] = ()
        if owner is not None and owner.quota:
            victims = self._evict_of(owner, owner.quota - arrival.nbytes, rank)
            is_within = owner.nbytes + owner.reserved + arrival.nbytes <= owner.quota
        else:
            is_within = True
        if is_within:
            victims += self._evict(self.quota - arrival.nbytes, rank)
        if not is_within or self.used + arrival.nbytes > self.quota:
            self._unlink(above, name)
            return Room(victims, False)
        self._arrivals[name] = arrival
        self.reserved += arrival.nbytes
        self._owners.count(arrival.key.namespace, 1)
        if owner is not None:
            owner.reserved += arrival.nbytes
        return Room(victims, True)

    def own(self, namespace: str, name: str, quota: int) -> tuple[ChunkKey, ...]:
        """Assign a namespace to the owner of this ``name``, who may have ``quota`` bytes from now on (0 is no bound).

        Return the chunks evicted because it was above that. O(n) once for a namespace that has chunks already.
        """
        owner, is_to_be_counted = self._owners.learn(namespace, name, quota)
        if is_to_be_counted:
            for chunk_name, chunk in self._chunks.items():
                if chunk.key.namespace == namespace:
                    self._give(chunk, owner)
                    self._list(chunk_name, chunk)
            for arrival in self._arrivals.values():
                if arrival.key.namespace == namespace:
                    owner.reserved += arrival.nbytes
        self._owners.note_excess(owner)
        return self._evict_of(owner, owner.quota, _ANY) if owner.excess > 0 else ()

    def add(self, key: ChunkKey, now_s: float) -> None:
        """Mark a reserved chunk as durable."""
        name = _name(key)
        arrival = self._take_arrival(name)
        parent = _name(arrival.parent) if arrival.parent else b""
        heat = first_heat(arrival.value, now_s)
        # The chunks before it may be on a higher tier, so it is not cut off even if they are not on the disk.
        self._insert(name, _Chunk(key, arrival.nbytes, heat, 0, arrival.place, parent))

    def give_up(self, key: ChunkKey) -> None:
        """Give up a reserved chunk that will not come."""
        name = _name(key)
        arrival = self._take_arrival(name)
        self._unlink(_name(arrival.parent) if arrival.parent else b"", name)
        self._list_all(self._reach.went(name))

    def touch(
        self, run: Sequence[ChunkKey], first_place: int, parent: ChunkKey | None, now_s: float, value: float = 0.0
    ) -> None:
        """Count a request for a run of consecutive chunks of one sequence as a use of each that is there.

        It also gives their places in the sequence, which not every chunk found at a start records itself. ``parent`` is
        the chunk before the first, None at the root or where it is not known. ``value`` as in a save.
        """
        above = _name(parent) if parent else b""
        for place, key in enumerate(run, first_place):
            name = _name(key)
            chunk = self._chunks.get(name)
            if chunk is not None:
                chunk.uses += 1
                chunk.heat = max(heat_after_use(chunk.heat, now_s), first_heat(value, now_s))
                chunk.place = place
                if above and chunk.parent != above:
                    self._unlink(chunk.parent, name)
                    self._links.add(above, name)
                    chunk.parent = above
                self._list(name, chunk)
            above = name

    def hold(self, key: ChunkKey) -> bool:
        """Keep a chunk that is about to be read until :meth:`release`; return False if it is not there."""
        chunk = self._chunks.get(_name(key))
        if chunk is None or chunk.away:
            return False
        chunk.readers += 1
        return True

    def release(self, key: ChunkKey) -> None:
        """End that read. Ignored for a chunk that was forgotten meanwhile."""
        name = _name(key)
        chunk = self._chunks.get(name)
        if chunk is not None and chunk.readers:
            chunk.readers -= 1
            self._list(name, chunk)

    def pin(self, identity: bytes, geometry: bytes) -> bool:
        """Keep a chunk, now or once it is there, until :meth:`unpin`; repeats change nothing, the caller keeps count.

        Return False, with nothing done, beyond :data:`MAX_PINS` names.
        """
        name = identity + geometry
        if name not in self._pins and len(self._pins) >= MAX_PINS:
            return False
        self._pins[name] = None
        return True

    def unpin(self, identity: bytes, geometry: bytes) -> None:
        """Undo :meth:`pin`; ignored without one."""
        name = identity + geometry
        self._pins.pop(name, None)
        chunk = self._chunks.get(name)
        if chunk is not None:
            self._list(name, chunk)

    def pin_alike(self, pinned: bytes, geometry: bytes) -> None:
        """Pin chunks of ``geometry`` that are pinned in the geometry ``pinned``, up to the bound. O(pins)."""
        for name in [name for name in self._pins if name.endswith(pinned)]:
            self.pin(name.removesuffix(pinned), geometry)

    def forget(self, key: ChunkKey) -> bool:
        """Remove a chunk that is gone, and cut off those behind it. Return False if it was not there."""
        if key not in self:
            return False
        self._remove(_name(key))
        return True

    def shrink(self, target: int | None = None) -> tuple[ChunkKey, ...]:
        """Evict the least worth until at most ``target`` bytes (by default the quota) are present or arriving."""
        return self._evict(self.quota if target is None else target, _ANY)

    def _evict(self, target: int, below: tuple[float, int]) -> tuple[ChunkKey, ...]:
        """Evict chunks above quotas, then those that rank below ``below``, until at most ``target`` bytes are used."""
        victims: tuple[ChunkKey, ...] = ()
        for owner in self._owners.above() if self.used > target else ():
            most = owner.nbytes + owner.reserved - (self.used - target)
            victims += self._evict_of(owner, max(owner.quota, most), _ANY)
        return victims + self._evict_from(self._heap, lambda: self.used > target, below)

    def _evict_of(self, owner: ChunkOwner, target: int, below: tuple[float, int]) -> tuple[ChunkKey, ...]:
        """Evict an owner's chunks that rank below ``below`` until it has at most ``target`` bytes.

        Arriving chunks count.
        """
        return self._evict_from(owner.heap, lambda: owner.nbytes + owner.reserved > target, below)

    def _evict_from(
        self, heap: list[Entry], is_too_much: Callable[[], bool], below: tuple[float, int]
    ) -> tuple[ChunkKey, ...]:
        victims: list[ChunkKey] = []
        while heap and is_too_much():
            entry = heap[0]
            chunk = self._chunks.get(entry[3])
            if chunk is None or not _is_valid(entry, chunk):
                heapq.heappop(heap)
            elif not self._may_go(entry[3], chunk):
                heapq.heappop(heap)
                chunk.is_listed = False  # It is listed again when it is released.
            elif self._is_searching and chunk.search == self._search:
                heapq.heappop(heap)
                chunk.is_listed = False
                self._held_back.append(entry[3])
            elif entry[:2] >= below:
                break
            elif chunk.away:
                heapq.heappop(heap)
                self._abandon(entry[3])
            else:
                heapq.heappop(heap)
                self._remove(entry[3])
                victims.append(chunk.key)
        self.evicted += len(victims)
        return tuple(victims)

    def _may_go(self, name: bytes, chunk: _Chunk) -> bool:
        return not chunk.readers and name not in self._pins and name not in self._links

    def _list(self, name: bytes, chunk: _Chunk) -> None:
        """Give a chunk a valid entry, if it may be evicted at all."""
        chunk.is_listed = self._may_go(name, chunk)
        if not chunk.is_listed:
            return
        self._numbers += 1
        chunk.number = self._numbers
        rank = -inf if chunk.is_cut_off else chunk.heat - log2(chunk.nbytes)
        entry = (rank, -chunk.place, chunk.number, name)
        heapq.heappush(self._heap, entry)
        self._tidy(self._heap, len(self._chunks))
        if chunk.owner is not None:
            heapq.heappush(chunk.owner.heap, entry)
            self._tidy(chunk.owner.heap, chunk.owner.chunks)

    def _list_all(self, chunks: dict[bytes, _Chunk]) -> None:
        for name, chunk in chunks.items():
            self._list(name, chunk)

    def _tidy(self, heap: list[Entry], chunks: int) -> None:
        """Drop the outdated entries of a heap of so many chunks, once they are most of it."""
        if len(heap) <= 2 * chunks + _SLACK:
            return
        known = ((entry, self._chunks.get(entry[3])) for entry in heap)
        heap[:] = [entry for entry, chunk in known if chunk is not None and _is_valid(entry, chunk)]
        heapq.heapify(heap)

    def _give(self, chunk: _Chunk, owner: ChunkOwner) -> None:
        """Count a present chunk as this owner's."""
        chunk.owner = owner
        owner.nbytes += chunk.nbytes
        owner.chunks += 1
        self._owners.note_excess(owner)

    def _insert(self, name: bytes, chunk: _Chunk) -> None:
        self._chunks[name] = chunk
        self.nbytes += chunk.nbytes
        self._reach.count(chunk.key.geometry, 1)
        self._owners.count(chunk.key.namespace, 1)
        owner = self._owners.of(chunk.key.namespace)
        if owner is not None:
            self._give(chunk, owner)
        self._list(name, chunk)
        if not chunk.is_cut_off:
            self._list_all(self._reach.came(name))

    def _abandon(self, name: bytes) -> None:
        """Remove a chunk of a directory that is away: its file stays for now, and is left over."""
        chunk = self._chunks[name]
        self._remove(name)
        self.leave_over(chunk.key, chunk.nbytes, chunk.away)

    def _remove(self, name: bytes) -> None:
        chunk = self._chunks.pop(name)
        self.nbytes -= chunk.nbytes
        self._reach.count(chunk.key.geometry, -1)
        self._owners.count(chunk.key.namespace, -1)
        if chunk.owner is not None:
            chunk.owner.nbytes -= chunk.nbytes
            chunk.owner.chunks -= 1
        self._unlink(chunk.parent, name)
        self._list_all(self._reach.went(name))

    def _take_arrival(self, name: bytes) -> Arrival:
        arrival = self._arrivals.pop(name, None)
        if arrival is None:
            raise InvariantViolated(f"chunk {name.hex()} was not on its way")
        self.reserved -= arrival.nbytes
        self._owners.count(arrival.key.namespace, -1)
        owner = self._owners.of(arrival.key.namespace)
        if owner is not None:
            owner.reserved -= arrival.nbytes
        return arrival

    def _unlink(self, parent: bytes, name: bytes) -> None:
        if self._links.remove(parent, name):
            chunk = self._chunks.get(parent)
            if chunk is not None:
                self._list(parent, chunk)
