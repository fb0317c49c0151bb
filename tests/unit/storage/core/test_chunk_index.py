"""What the disk keeps, against a model that looks at everything each time."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from math import inf, log2
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.storage.backends import UNKNOWN, ChunkEntry, ChunkKey
from services.storage.core.chunk_index import Arrival, ChunkIndex
from services.storage.core.chunk_worth import first_heat, heat_after_use, heat_again
from shared.errors import InvariantViolated

GEOMETRY, OTHER = b"g" * 8, b"h" * 8


def _key(number: int, geometry: bytes = GEOMETRY, namespace: str = "aa") -> ChunkKey:
    return ChunkKey(namespace, geometry, number.to_bytes(16, "big"))


def _save(index: ChunkIndex, number: int, *, place: int = 0, above: int | None = None, value: float = 0.0,
          nbytes: int = 10, now_s: float = 0.0) -> list[int] | None:  # fmt: skip
    """Reserve and add; the numbers of the victims, None if there was no room."""
    parent = None if above is None else _key(above)
    room = index.reserve(Arrival(_key(number), nbytes, place, parent, value), now_s)
    if room.is_granted:
        index.add(_key(number), now_s)
        return [int.from_bytes(key.identity, "big") for key in room.victims]
    return None


def test_the_least_recent_goes_first_among_equals() -> None:
    """Chunks of equal hotness leave in order of their last use."""
    index = ChunkIndex(30)
    for number in (1, 2, 3):
        _save(index, number, now_s=float(number))
    index.touch([_key(1)], 0, None, 4.0)

    assert _save(index, 4, now_s=5.0) == [2]


@pytest.mark.parametrize(
    ("quota", "saved", "newcomer", "victims"),
    [
        (20, [{"value": 100.0}, {"now_s": 1.0}], {"now_s": 2.0}, [2]),
        (10, [{"value": 1000.0}], {}, None),
        (100, [{"nbytes": 20}, {"nbytes": 80}], {"now_s": 1.0}, [2]),
        (20, [{}, {"place": 7, "above": 99}], {"now_s": 1.0}, [2]),
        (20, [{}, {"place": 1, "above": 1}], {"place": 2, "above": 2, "value": 1e9, "now_s": 1e6}, None),
    ],
    ids=["the colder", "none that is hotter", "the larger", "of equals the deeper", "not what it continues"],
)
def test_a_newcomer_drives_out_the_least_worth_per_byte(
    quota: int, saved: list[dict[str, Any]], newcomer: dict[str, Any], victims: list[int] | None
) -> None:
    """A prefix that is longer than the quota keeps its beginning."""
    index = ChunkIndex(quota)
    for number, save in enumerate(saved, 1):
        _save(index, number, **save)

    assert _save(index, 9, **newcomer) == victims
    assert len(index) == len(saved)


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    """However hot the end is: without what is above it, it is of no use."""
    index = ChunkIndex(30)
    _save(index, 1, place=0, now_s=0.0)
    _save(index, 2, place=1, above=1, now_s=0.0)
    _save(index, 3, place=2, above=2, value=2.0, now_s=0.0)

    assert _save(index, 4, now_s=50_000.0) == [3]
    assert _save(index, 5, now_s=60_000.0) == [2]


def test_what_is_read_or_pinned_stays() -> None:
    """Readers keep a chunk until the last lets go of it; a pin keeps it until it is undone, once."""
    index = ChunkIndex(20)
    _save(index, 1)
    _save(index, 2)
    index.pin(_key(1).identity, GEOMETRY)
    index.pin(_key(1).identity, GEOMETRY)
    index.hold(_key(2))
    index.hold(_key(2))

    assert _save(index, 3, now_s=1e6) is None
    index.release(_key(2))
    assert _save(index, 3, now_s=1e6) is None
    index.release(_key(2))
    assert _save(index, 3, now_s=1e6) == [2]
    index.unpin(_key(1).identity, GEOMETRY)
    assert _save(index, 4, now_s=2e6) == [1]


def test_what_is_pinned_of_one_geometry_can_be_pinned_of_another() -> None:
    """Pins are copied as they are at that moment, and each is undone by itself."""
    index = ChunkIndex(100)
    for number in (1, 2):
        index.pin(_key(number).identity, GEOMETRY)
    index.pin(_key(3).identity, OTHER)
    index.pin_alike(GEOMETRY, OTHER)
    index.unpin(_key(2).identity, OTHER)
    for number in (1, 2):
        index.found(ChunkEntry(_key(number, OTHER), 10), 0.0)
        index.found(ChunkEntry(_key(number), 10), 0.0)

    assert index.pinned == 4
    assert index.shrink(0) == (_key(2, OTHER),)


def test_a_pin_waits_for_its_chunk() -> None:
    """What is pinned before it is there is kept once it is; unpinning what was not pinned is fine."""
    index = ChunkIndex(10)
    index.pin(_key(1).identity, GEOMETRY)
    index.unpin(_key(5).identity, GEOMETRY)
    _save(index, 1)

    assert _save(index, 2, now_s=1e6) is None


def test_what_a_start_found_learns_its_place() -> None:
    """Found chunks know no sequence until an order names it; then their beginning outlives their end."""
    index = ChunkIndex(100)
    for number in (2, 1, 3):
        index.found(ChunkEntry(_key(number), 10), 0.0)
    index.touch([_key(1), _key(2), _key(3)], 0, None, 1.0)

    assert index.shrink(20) == (_key(3),)
    assert index.shrink(10) == (_key(2),)


def test_what_a_start_found_is_kept_within_the_quota() -> None:
    """More than the quota may be found; shrinking evicts the least worth, of whichever geometry."""
    index = ChunkIndex(25)
    index.found(ChunkEntry(_key(1, OTHER), 10), 0.0)
    index.found(ChunkEntry(_key(2), 10), 0.0)
    index.found(ChunkEntry(_key(3), 10), 0.0)
    index.touch([_key(2), _key(3)], 0, None, 1.0)

    assert index.shrink() == (_key(1, OTHER),)
    assert index.keys(geometry=GEOMETRY) == [_key(2), _key(3)]


def _find(index: ChunkIndex, number: int, above: int | None = None, *, heat: float | None = None) -> bool:
    parent = None if above is None else _key(above)
    return index.found(ChunkEntry(_key(number), 10, 0 if above is None else 1, parent, heat), 0.0)


def test_nothing_that_is_found_goes_before_everything_is() -> None:
    """What continues it may be found last, and keeps it then."""
    index = ChunkIndex(20)
    index.search()
    _find(index, 1)
    _find(index, 2, heat=3.0)
    has_gone_before = _save(index, 9, value=50.0)
    _find(index, 3, 1, heat=4.0)
    index.searched()

    assert has_gone_before is None
    assert index.shrink() == (_key(2),)


def test_what_is_found_without_what_it_continues_goes_first() -> None:
    """However hot it is, until what it continues is there, in whatever form."""
    index = ChunkIndex(100)
    _find(index, 1)
    _find(index, 3, 2, heat=9.0)
    index.found(ChunkEntry(_key(5, OTHER), 10, 1, _key(4, OTHER), 9.0), 0.0)
    _find(index, 4)

    assert index.shrink(30) == (_key(3),)
    assert index.shrink(20) == (_key(1),)


def test_chunks_of_a_directory_that_is_away_count_and_keep_their_places() -> None:
    """They are not there; what has to go of them takes its room along until the directory is back without it."""
    index = ChunkIndex(40)
    for number in range(1, 5):
        _save(index, number, place=number - 1, above=number - 1 or None)
    assert index.leave([_key(2), _key(4), _key(9)], "/a") == [_key(2), _key(4)]
    there, used = index.keys(), index.used
    victims = _save(index, 5, value=9.0, now_s=1.0)  # Makes 4 go, whose file stays, and 3.
    back = [_find(index, 2, 1), _find(index, 4, 3)]
    used_then = index.used
    index.returned("/a")
    index.cleared(_key(4))

    assert (there, used) == ([_key(1), _key(3)], 40)
    assert (victims, back) == ([3], [True, False])
    assert (used_then, index.used) == (40, 30)
    assert index.keys() == [_key(1), _key(2), _key(5)]


def test_what_a_directory_lost_while_it_was_away_is_gone_with_its_return() -> None:
    """Whether it was still wanted or not; and a chunk that is away may be saved again."""
    index = ChunkIndex(100)
    for number in (1, 2, 3):
        _save(index, number)
    index.leave([_key(1), _key(2), _key(3)], "/a")
    again = _save(index, 1)
    used = index.used
    index.returned("/a")

    assert (again, used) == ([], 40)
    assert (index.keys(), index.used) == ([_key(1)], 10)
    assert not index.hold(_key(2))


def test_a_chunk_is_reserved_once() -> None:
    """Reserving what is there or on its way, and adding what was not reserved, are errors of the storage's own."""
    index = ChunkIndex(100)
    index.reserve(Arrival(_key(1), 10, 0, None), 0.0)

    with pytest.raises(InvariantViolated):
        index.reserve(Arrival(_key(1), 10, 0, None), 0.0)
    with pytest.raises(InvariantViolated):
        index.add(_key(2), 0.0)


def test_memory_of_a_chunk_is_bounded() -> None:
    """A chunk that is touched often costs less than a kilobyte, key included."""
    count = 2000
    index = ChunkIndex(10**9)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        _save(index, number, place=number % 10, above=number - 1 if number % 10 else None)
    for turn in range(20):
        index.touch([_key(number) for number in range(0, count, 10)], 0, None, float(turn))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (after - before) / count < 1000


@dataclass
class _Known:
    nbytes: int
    heat: float
    place: int
    parent: int | None
    order: int
    readers: int = 0
    is_cut_off: bool = False


@dataclass
class _Model:
    """Does the same with lists: the victim is found by looking at every chunk."""

    quota: int
    chunks: dict[int, _Known] = field(default_factory=dict)
    arrivals: dict[int, tuple[int, int, int | None, float]] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)
    order: int = 0

    @property
    def used(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks.values()) + sum(size for size, *_ in self.arrivals.values())

    def continued(self) -> set[int]:
        parents = [chunk.parent for chunk in self.chunks.values()] + [
            parent for _, _, parent, _ in self.arrivals.values()
        ]
        return {parent for parent in parents if parent is not None}

    def candidates(self, continued: set[int]) -> list[int]:
        return [
            number
            for number, chunk in self.chunks.items()
            if number not in continued and not chunk.readers and number not in self.pins
        ]

    def rank(self, number: int) -> tuple[float, int]:
        chunk = self.chunks[number]
        return -inf if chunk.is_cut_off else chunk.heat - log2(chunk.nbytes), -chunk.place

    def reached(self, number: int) -> bool:
        return number in self.arrivals or (number in self.chunks and not self.chunks[number].is_cut_off)

    def lost(self, number: int) -> None:
        """What continues it is cut off, and so on down."""
        if not self.reached(number):
            for child, chunk in self.chunks.items():
                if chunk.parent == number and not chunk.is_cut_off:
                    chunk.is_cut_off = True
                    self.lost(child)

    def came(self, number: int) -> None:
        for child, chunk in self.chunks.items():
            if chunk.parent == number and chunk.is_cut_off:
                chunk.is_cut_off = False
                self.came(child)


class IndexMachine(RuleBasedStateMachine):
    """Trees of chunks: number n continues n // 3, so that prefixes are shared."""

    numbers = st.integers(1, 40)

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(60)
        self.model = _Model(60)
        self.now_s = 0.0

    def _place(self, number: int) -> int:
        place = 0
        while number >= 3:
            number //= 3
            place += 1
        return place

    def _above(self, number: int) -> int | None:
        return number // 3 if number >= 3 else None

    @rule(
        number=numbers,
        nbytes=st.integers(1, 30),
        value=st.sampled_from([0.0, 1.0, 50.0]),
        step=st.sampled_from([0.0, 500.0]),
    )
    def reserve(self, number: int, nbytes: int, value: float, step: float) -> None:
        if number in self.model.chunks or number in self.model.arrivals:
            return
        self.now_s += step
        above, place = self._above(number), self._place(number)
        parent = None if above is None else _key(above)
        room = self.index.reserve(Arrival(_key(number), nbytes, place, parent, value), self.now_s)
        reserved = sum(size for size, *_ in self.model.arrivals.values())
        victims: list[int] = []
        if nbytes + reserved <= self.model.quota:
            continued = self.model.continued() | ({above} if above is not None else set())
            below = (first_heat(value, self.now_s) - log2(nbytes), -place)
            while self.model.used + nbytes > self.model.quota:
                able = self.model.candidates(continued)
                if not able:
                    break
                worst = min(self.model.rank(victim) for victim in able)
                if worst >= below:
                    break
                gone = int.from_bytes(room.victims[len(victims)].identity, "big")
                assert gone in able
                assert self.model.rank(gone) == worst
                del self.model.chunks[gone]
                continued = self.model.continued() | ({above} if above is not None else set())
                victims.append(gone)
        assert len(victims) == len(room.victims)
        fits = self.model.used + nbytes <= self.model.quota
        assert room.is_granted == fits
        if fits:
            self.model.arrivals[number] = (nbytes, place, above, value)

    @precondition(lambda self: self.model.arrivals)
    @rule(data=st.data(), is_added=st.booleans())
    def arrive(self, data: st.DataObject, is_added: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.arrivals)))
        nbytes, place, above, value = self.model.arrivals.pop(number)
        if is_added:
            self.index.add(_key(number), self.now_s)
            self.model.order += 1
            heat = first_heat(value, self.now_s)
            self.model.chunks[number] = _Known(nbytes, heat, place, above, self.model.order)
            self.model.came(number)
        else:
            self.index.give_up(_key(number))
            self.model.lost(number)

    @rule(number=numbers, nbytes=st.integers(1, 30), is_placed=st.booleans(), noted=st.none() | st.floats(-9, 9))
    def find(self, number: int, nbytes: int, is_placed: bool, noted: float | None) -> None:
        above = self._above(number) if is_placed else None
        place = self._place(number) if is_placed else UNKNOWN
        entry = ChunkEntry(_key(number), nbytes, place, None if above is None else _key(above), noted)
        self.index.found(entry, self.now_s)
        if number not in self.model.chunks and number not in self.model.arrivals:
            self.model.order += 1
            heat = first_heat(0.0, self.now_s) if noted is None else heat_again(noted, self.now_s)
            known = _Known(nbytes, heat, place, above, self.model.order)
            known.is_cut_off = above is not None and not self.model.reached(above)
            self.model.chunks[number] = known
            if not known.is_cut_off:
                self.model.came(number)

    @rule(number=numbers, step=st.sampled_from([0.0, 100.0, 5000.0]))
    def touch(self, number: int, step: float) -> None:
        self.now_s += step
        run = [number]
        while (above := self._above(run[0])) is not None:
            run.insert(0, above)
        self.index.touch([_key(each) for each in run], 0, None, self.now_s)
        for place, each in enumerate(run):
            known = self.model.chunks.get(each)
            if known is not None:
                known.heat = max(heat_after_use(known.heat, self.now_s), first_heat(0.0, self.now_s))
                known.place = place
                known.parent = self._above(each) if place else known.parent

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        assert self.index.hold(_key(number)) == (number in self.model.chunks)
        if number in self.model.chunks:
            self.model.chunks[number].readers += 1

    @rule(number=numbers)
    def release(self, number: int) -> None:
        self.index.release(_key(number))
        known = self.model.chunks.get(number)
        if known is not None and known.readers:
            known.readers -= 1

    @rule(number=numbers, is_pinned=st.booleans())
    def pin(self, number: int, is_pinned: bool) -> None:
        if is_pinned:
            self.index.pin(_key(number).identity, GEOMETRY)
            self.model.pins[number] = 1
        else:
            self.index.unpin(_key(number).identity, GEOMETRY)
            self.model.pins.pop(number, None)

    @rule(number=numbers)
    def forget(self, number: int) -> None:
        is_there = self.model.chunks.pop(number, None) is not None
        assert self.index.forget(_key(number)) == is_there
        if is_there:
            self.model.lost(number)

    @rule(most=st.integers(0, 80))
    def shrink(self, most: int) -> None:
        for key in self.index.shrink(most):
            number = int.from_bytes(key.identity, "big")
            able = self.model.candidates(self.model.continued())
            assert number in able
            assert self.model.rank(number) == min(self.model.rank(each) for each in able)
            del self.model.chunks[number]
        if self.model.used > most:
            assert not self.model.candidates(self.model.continued())

    @invariant()
    def agree(self) -> None:
        chunks = self.model.chunks
        there = self.index.keys()
        assert {int.from_bytes(key.identity, "big") for key in there} == set(chunks)
        assert self.index.nbytes == sum(chunk.nbytes for chunk in chunks.values())
        assert self.index.reserved == sum(size for size, *_ in self.model.arrivals.values())
        assert len(self.index._heap) <= 2 * len(chunks) + 64 + 1


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=60)
