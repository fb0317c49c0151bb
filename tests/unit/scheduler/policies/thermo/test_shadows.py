"""Shadow caches against naive ones, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from services.scheduler.policies.thermo.law import COUNT_SHIFT, Law, rounded_one
from services.scheduler.policies.thermo.rules import FADING, FREQUENCY, LASTING, LEARNED, RECENCY, ROUNDS, RULES
from services.scheduler.policies.thermo.shadows import Shadows


def accesses(count: int, items: int) -> Iterator[int]:
    """A fixed sequence in which small items are asked for more often."""
    value = 7
    for _ in range(count):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        yield int(items * ((value >> 16) / 2**15) ** 2)


def ask(
    shadows: Shadows,
    uses: dict[int, int],
    item: int,
    now: float,
    capacity: int,
    fading: float = 1.0,
    turnover_s: float = 1.0,
) -> None:
    """One request for one item."""
    uses[item] = uses.get(item, 0) + 1
    shadows.reused(item)
    shadows.enter(item, now, uses[item] << COUNT_SHIFT)
    shadows.settle(capacity, now, Law(), fading, turnover_s)


def naive_hits(trace: list[int], capacity: int, key: Callable[..., Any]) -> int:
    """Hits of a cache that evicts the item with the least key of (uses ever, last use)."""
    held = {}
    uses: dict[int, int] = {}
    hits = []
    for now, item in enumerate(trace):
        hits.append(item in held)
        uses[item] = uses.get(item, 0) + 1
        held[item] = (uses[item], now)
        while len(held) > capacity:
            del held[min(held, key=lambda known: (key(*held[known]), known))]
    return sum(hits)


def test_every_simple_rule_hits_as_a_naive_cache_does() -> None:
    """Their leads over one another are the differences of what naive caches hit, to the last."""
    trace, capacity = list(accesses(600, 60)), 12
    shadows = Shadows()
    uses: dict[int, int] = {}
    for now, item in enumerate(trace):
        ask(shadows, uses, item, float(now), capacity)

    recency = naive_hits(trace, capacity, lambda uses, last: last)
    frequency = naive_hits(trace, capacity, lambda uses, last: (uses, last))
    rounds = naive_hits(trace, capacity, lambda uses, last: (uses, -last))
    assert shadows.leads[RULES * FREQUENCY + RECENCY] == frequency - recency > 0
    assert shadows.leads[RULES * ROUNDS + RECENCY] == rounds - recency
    assert shadows.leads[RULES * RECENCY + FREQUENCY] == recency - frequency


def test_fading_uses_hit_as_a_naive_cache_does_and_half_lives_follow_the_turnover() -> None:
    """By uses that count half after 16 s, or after 64; a turnover that is another by far ranks all anew."""
    trace, capacity = list(accesses(600, 60)), 12
    uses: dict[int, int] = {}
    shadows = Shadows()
    for now, item in enumerate(trace):
        ask(shadows, uses, item, float(now), capacity, turnover_s=17.0)

    recency = naive_hits(trace, capacity, lambda uses, last: last)
    for rule, half_life_s in ((FADING, 16.0), (LASTING, 64.0)):
        fading = naive_hits(trace, capacity, lambda uses, last, s=half_life_s: last + s * rounded_one(math.log2(uses)))
        assert shadows.leads[RULES * rule + RECENCY] == fading - recency > 0

    assert shadows.turnover_s == 16.0
    ask(shadows, uses, 999, 600.0, capacity, turnover_s=20.0)
    assert shadows.turnover_s == 16.0
    ask(shadows, uses, 998, 601.0, capacity, turnover_s=100.0)
    assert shadows.turnover_s == 128.0


def test_hits_of_one_request_are_one_piece_of_evidence() -> None:
    """Ten prefixes that one rule holds and that come back together count a hundred in its squares, not ten."""
    shadows, uses = Shadows(), {}
    for item in range(10):
        uses[item] = 1
        shadows.enter(item, 0.0, 5 << COUNT_SHIFT)
    for item in range(10, 20):
        shadows.enter(item, 1.0, 1 << COUNT_SHIFT)
    shadows.settle(10, 1.0, Law(), 1.0, 1.0)
    for item in range(10):
        shadows.reused(item)
    shadows.settle(10, 2.0, Law(), 1.0, 1.0)

    assert shadows.leads[RULES * FREQUENCY + RECENCY] == 10
    assert shadows.squares[RULES * FREQUENCY + RECENCY] == 100


def test_changed_features_change_the_order() -> None:
    """What becomes worth more under a rule stays."""
    shadows = Shadows()
    for item in range(3):
        shadows.enter(item, float(item), 1 << COUNT_SHIFT)
    shadows.changed(0, 9 << COUNT_SHIFT)
    shadows.settle(2, 3.0, Law(), 1.0, 1.0)

    assert shadows.known[0].held >> FREQUENCY & 1
    assert not shadows.known[1].held >> FREQUENCY & 1
    assert not shadows.known[0].held >> RECENCY & 1


@pytest.mark.parametrize("items", [20, 5000])
def test_memory_is_bounded(items: int) -> None:
    """By the capacity, whether everything fits and is used again and again or nothing does."""
    shadows = Shadows()
    uses: dict[int, int] = {}
    capacity = 40
    for now, item in enumerate(accesses(8000, items)):
        ask(shadows, uses, item, float(now), capacity)

    assert max(shadows.sizes) <= capacity + 1
    assert len(shadows.known) <= RULES * (capacity + 1)
    assert len(shadows.round) <= 2 * (capacity + 1) + 64
    assert all(len(heap) <= 2 * (capacity + 1) + 64 for heap in shadows.heaps)


def test_many_are_evicted_a_few_at_a_time() -> None:
    """A capacity that falls is reached over several requests, so that none of them waits for it."""
    shadows = Shadows()
    for item in range(500):
        shadows.enter(item, float(item), 1 << COUNT_SHIFT)
    sizes = []
    for _ in range(20):
        shadows.settle(100, 500.0, Law(), 1.0, 1.0)
        sizes.append(tuple(shadows.sizes))

    assert all(before - after <= 32 for before, after in zip(sizes[0], sizes[1], strict=True))
    assert max(sizes[-1]) <= 101


def test_goes_on_from_a_snapshot() -> None:
    """Encoded and decoded midway it counts the same."""
    results = []
    for is_broken in (False, True):
        shadows = Shadows()
        uses: dict[int, int] = {}
        for now, item in enumerate(accesses(900, 90)):
            if is_broken and now % 100 == 50:
                shadows = msgspec.msgpack.decode(msgspec.msgpack.encode(shadows), type=Shadows)
            ask(shadows, uses, item, float(now), 15, fading=0.99)
        results.append(msgspec.msgpack.encode(shadows))

    assert results[0] == results[1]


def test_learned_rule_finds_the_lowest_of_many_in_several_requests() -> None:
    """Before anything is learned the law is recency. What goes is the oldest of all, not of a part of them."""
    shadows = Shadows()
    uses: dict[int, int] = {}
    newest_first = range(1500, 0, -1)
    for last in newest_first:
        shadows.enter(last, float(last), 1 << COUNT_SHIFT)
    requests = 0
    while shadows.sizes[LEARNED] == 1500 + requests:
        requests += 1
        ask(shadows, uses, 10_000 + requests, 10_000.0 + requests, 1490)
    gone = [last for last in newest_first if last not in shadows.known or not shadows.known[last].held >> LEARNED & 1]

    assert requests == 3
    assert gone == list(range(len(gone), 0, -1))
    assert shadows.sizes[LEARNED] <= 1490
