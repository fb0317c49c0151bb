"""The hotness-aware cuckoo filter, against a dictionary where that says the same."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.scheduler.core.cache.digests import mix, mix_all
from services.scheduler.core.cache.hotness.filter import SLOTS, HotnessFilter, vector

digests = st.integers(0, 2**64 - 1)


def slots(hotness: HotnessFilter) -> list[tuple[int, int, int, int]]:
    """Every entry that is in use: (tag, frequency, clock, depth), sorted."""
    columns = zip(
        vector(hotness.tags, hotness.tag_bits).tolist(),
        vector(hotness.frequencies, hotness.frequency_bits).tolist(),
        vector(hotness.clocks, hotness.clock_bits).tolist(),
        vector(hotness.depths, hotness.depth_bits).tolist(),
        strict=True,
    )
    return sorted(entry for entry in columns if entry[0])


def filled(seed: int = 1, **fields: Any) -> tuple[HotnessFilter, dict[int, tuple[int, int, int]], int]:
    """A filter filled to its first failure, what was put into it, and the digest that found no room."""
    hotness = HotnessFilter(**{"base_bits": 4, "fingerprint_bits": 24} | fields)
    known: dict[int, tuple[int, int, int]] = {}
    while True:
        digest = mix(seed * 1_000_003 + len(known))
        values = (len(known) % 251 + 1, len(known) % 17, len(known) % 13)
        if not hotness.put(digest, *values):
            return hotness, known, digest
        known[digest] = values


def test_a_new_filter_knows_nothing() -> None:
    """Frequency and clock are 0, and nothing is in use."""
    hotness = HotnessFilter()

    assert hotness.lookup(7) == (0, 0)
    assert hotness.depth_of(7) == 0
    assert hotness.load_factor == 0


def test_a_touch_counts_and_winds_the_clock_up() -> None:
    """The first gives frequency 1, each later one more; the clock is at its maximum again."""
    hotness = HotnessFilter()
    hotness.touch(7, 3)
    hotness.age()

    assert hotness.lookup(7) == (1, 254)
    assert hotness.touch(7, 4)
    assert hotness.lookup(7) == (2, 255)
    assert hotness.depth_of(7) == 4
    assert hotness.occupied == 1


@pytest.mark.parametrize("bits", [2, 4, 8, 12, 16])
def test_values_stop_at_what_their_width_holds(bits: int) -> None:
    """Frequency and depth saturate, the clock starts at 2**bits - 1 and stays at 0 once it is there."""
    hotness = HotnessFilter(clock_bits=bits, frequency_bits=bits, depth_bits=bits)
    most = 2**bits - 1
    hotness.put(7, most - 1, most, most + 5)
    for _ in range(3):
        hotness.touch(7, most + 1)

    assert hotness.lookup(7) == (most, most)
    assert hotness.depth_of(7) == most
    hotness.put(7, most, 1, 0)
    for _ in range(3):
        hotness.age()
    assert hotness.lookup(7) == (most, 0)


@pytest.mark.parametrize("fingerprint_bits", [4, 8, 9, 17, 32])
@pytest.mark.parametrize("growth_bits", [0, 8])
def test_every_width_of_tag_finds_what_was_put(fingerprint_bits: int, growth_bits: int) -> None:
    """Whether a tag takes 1, 2, 4 or 8 bytes, and whether it crosses a byte's border."""
    hotness = HotnessFilter(fingerprint_bits=fingerprint_bits, growth_bits=growth_bits)
    known = [mix(number) for number in range(200)]
    for digest in known:
        assert hotness.touch(digest, 1)

    assert all(hotness.lookup(digest)[0] >= 1 for digest in known)


def test_tags_that_look_empty_are_never_given() -> None:
    """A digest whose fingerprint bits are all 0 is found like any other."""
    hotness = HotnessFilter(fingerprint_bits=4, growth_bits=0)
    zero = next(number for number in range(10_000) if mix(number) & 15 == 0)
    hotness.touch(zero, 1)

    assert hotness.occupied == 1
    assert hotness.lookup(zero) == (1, 255)
    assert hotness.slots_of(np.array([zero], dtype=np.uint64))[0] >= 0


def test_a_full_filter_refuses_and_changes_nothing() -> None:
    """An insertion that finds no room leaves every byte as it was, and says so."""
    hotness, known, refused = filled()
    before = msgspec.msgpack.encode(hotness)

    assert not hotness.touch(refused, 1)
    assert not hotness.put(refused, 5, 5, 5)
    assert msgspec.msgpack.encode(hotness) == before
    assert all((*hotness.lookup(digest), hotness.depth_of(digest)) == values for digest, values in known.items())


def test_kicks_fill_more_than_two_buckets_alone_would() -> None:
    """Entries make room for each other up to a load factor of nine tenths and more."""
    hotness, _, _ = filled(base_bits=8)

    assert hotness.load_factor > 0.9


def test_growth_loses_nothing() -> None:
    """After each doubling every prefix has its values, whether anyone still has its digest or not."""
    hotness, known, refused = filled(fingerprint_bits=24, growth_bits=3)
    entries = slots(hotness)
    for doubling in range(1, 4):
        assert hotness.grow()
        assert hotness.capacity == SLOTS << 4 + doubling
        assert slots(hotness) == entries
        assert all((*hotness.lookup(digest), hotness.depth_of(digest)) == values for digest, values in known.items())
    assert hotness.put(refused, 1, 1, 1)


def test_the_coldest_go_in_order() -> None:
    """By frequency times clock, then by frequency."""
    hotness = HotnessFilter(fingerprint_bits=24)
    order = [(1, 0), (9, 0), (1, 200), (9, 100)]
    for number, (frequency, clock) in enumerate(order):
        hotness.put(mix(number), frequency, clock, 1)

    for number in range(4):
        assert hotness.drop_coldest(np.array([], dtype=np.uint64), 1) == 1
        left = [hotness.lookup(mix(other)) for other in range(4)]
        assert left == [(0, 0)] * (number + 1) + order[number + 1 :]


@given(st.lists(digests, min_size=1, max_size=60), st.integers(0, 3))
def test_vectors_and_single_digests_are_found_alike(some: list[int], doublings: int) -> None:
    """The vectorised search finds the entry that a lookup reads, and nothing for what is unknown."""
    hotness = HotnessFilter(base_bits=5, fingerprint_bits=6, growth_bits=3)
    for _ in range(doublings):
        hotness.grow()
    for digest in some[::2]:
        hotness.touch(digest, 1)
    found = hotness.slots_of(np.array(some, dtype=np.uint64))

    assert [hotness._slot(digest) for digest in some] == found.tolist()


@given(st.lists(digests, max_size=50))
def test_mixing_is_the_same_for_one_and_for_many(some: list[int]) -> None:
    """splitmix64 of a number does not depend on how it is computed."""
    assert [mix(value) for value in some] == mix_all(np.array(some, dtype=np.uint64)).tolist()


def test_mixing_is_splitmix64() -> None:
    """The published sequence from seed 1234567, so that filters of other builds mean the same."""
    step = 0x9E3779B97F4A7C15
    sequence = [mix(1234567 + number * step & 2**64 - 1) for number in range(3)]

    assert sequence == [6457827717110365317, 3203168211198807973, 9817491932198370423]


class FilterMachine(RuleBasedStateMachine):
    """The filter and a dictionary that counts exactly.

    The tags are wide, so entries are shared only where the machine itself makes two digests equal; then everything
    that the dictionary says must be true of the filter.
    """

    @initialize(base_bits=st.integers(2, 4), clock_bits=st.sampled_from([2, 8, 12]))
    def start(self, base_bits: int, clock_bits: int) -> None:
        self.hotness = HotnessFilter(
            fingerprint_bits=32, clock_bits=clock_bits, frequency_bits=3, growth_bits=2, base_bits=base_bits
        )
        self.known: dict[int, tuple[int, int, int]] = {}

    @rule(number=st.integers(0, 120), depth=st.integers(0, 9))
    def touch(self, number: int, depth: int) -> None:
        """Either it counts, or the filter is full, the prefix new, and nothing has changed."""
        frequency = self.known.get(number, (0, 0, 0))[0]
        before = msgspec.msgpack.encode(self.hotness)
        if self.hotness.touch(mix(number), depth):
            self.known[number] = (min(7, frequency + 1), self.hotness.max_age, depth)
        else:
            assert number not in self.known
            assert msgspec.msgpack.encode(self.hotness) == before

    @rule()
    def age(self) -> None:
        self.hotness.age()
        self.known = {
            number: (frequency, max(0, clock - 1), depth) for number, (frequency, clock, depth) in self.known.items()
        }

    @rule()
    def grow(self) -> None:
        may_grow = self.hotness.doublings < self.hotness.growth_bits
        assert self.hotness.grow() is may_grow

    @rule(kept=st.lists(st.integers(0, 120), max_size=20), amount=st.integers(0, 30))
    def drop(self, kept: list[int], amount: int) -> None:
        """What goes is never kept, and as much goes as may."""
        keep = np.array([mix(number) for number in kept], dtype=np.uint64)
        droppable = [number for number in self.known if number not in kept]
        gone = self.hotness.drop_coldest(keep, amount)
        left = {number for number in self.known if self.hotness.lookup(mix(number))[0]}
        assert gone == min(amount, len(droppable)) == len(self.known) - len(left)
        assert left.issuperset(number for number in kept if number in self.known)
        self.known = {number: values for number, values in self.known.items() if number in left}

    @rule()
    def restore(self) -> None:
        """A snapshot in between changes nothing, and equal states give equal bytes."""
        encoded = msgspec.msgpack.encode(self.hotness)
        self.hotness = msgspec.msgpack.decode(encoded, type=HotnessFilter)
        assert msgspec.msgpack.encode(self.hotness) == encoded

    @invariant()
    def says_what_the_dictionary_says(self) -> None:
        for number, (frequency, clock, depth) in self.known.items():
            assert self.hotness.lookup(mix(number)) == (frequency, clock)
            assert self.hotness.depth_of(mix(number)) == depth
        assert self.hotness.occupied == len(self.known) == len(slots(self.hotness))


FilterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestFilterMachine = FilterMachine.TestCase


@settings(max_examples=40)
@given(st.lists(st.integers(0, 200), max_size=400), st.integers(4, 8))
def test_a_shared_entry_overstates_and_never_understates(touches: list[int], fingerprint_bits: int) -> None:
    """With narrow tags prefixes share entries; each still has at least its own count, up to saturation."""
    hotness = HotnessFilter(fingerprint_bits=fingerprint_bits, frequency_bits=4, growth_bits=0, base_bits=7)
    counted: dict[int, int] = {}
    for number in touches:
        assert hotness.touch(mix(number), 1)
        counted[number] = counted.get(number, 0) + 1

    assert all(hotness.lookup(mix(number))[0] >= min(15, times) for number, times in counted.items())
    assert hotness.occupied <= len(counted)


@given(
    some=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60),
    path=st.lists(st.integers(0, 80), min_size=1, max_size=40),
    widths=st.sampled_from([(8, 8, 8), (8, 4, 8), (16, 8, 8)]),
)
def test_a_path_is_touched_as_its_prefixes_one_by_one(
    some: list[int], path: list[int], widths: tuple[int, int, int]
) -> None:
    """Or not at all: where one of them is new, or two share an entry."""
    clock, frequency, depth = widths
    filters = [HotnessFilter(clock_bits=clock, frequency_bits=frequency, depth_bits=depth) for _ in range(2)]
    for each in filters:
        for digest in some:
            each.touch(digest, 1)
        each.age()
    asked = [some[place % len(some)] if place < 75 else place for place in path]
    before = msgspec.msgpack.encode(filters[0])

    if filters[0].touch_all(np.array(asked, np.uint64), 250):
        for above, digest in enumerate(asked):
            filters[1].touch(digest, 250 + above)
        assert filters[0] == filters[1]
    else:
        is_wide = widths != (8, 8, 8)
        is_new = any(filters[1].lookup(digest) == (0, 0) for digest in asked)
        slots = filters[1].slots_of(np.array(asked, np.uint64)).tolist()
        assert is_wide or is_new or len(set(slots)) < len(slots)
        assert msgspec.msgpack.encode(filters[0]) == before
