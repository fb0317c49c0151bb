"""Shadow caches against naive ones, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from services.scheduler.policies.thermo import shadows as module
from services.scheduler.policies.thermo.law import COUNT_SHIFT, Law, rounded_one
from services.scheduler.policies.thermo.rules import FADING, FREQUENCY, LASTING, RECENCY, ROUNDS, RULES
from services.scheduler.policies.thermo.shadows import SMALL, Shadows, lowest


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
    shadows.enter(item, now, uses[item] << COUNT_SHIFT, 1.0)
    settle(shadows, capacity, now, fading, turnover_s)


def settle(shadows: Shadows, capacity: int, now: float, fading: float = 1.0, turnover_s: float = 1.0) -> None:
    """Settle a request and do at once what falls due with it."""
    shadows.settle(capacity, now, Law(), fading, turnover_s)
    shadows.evict(capacity, now, Law())


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


def sizes(shadows: Shadows) -> list[int]:
    """Samples in each rule's cache."""
    return [sum(held >> rule & 1 for held in shadows.held) for rule in range(RULES)]


def holds(shadows: Shadows, rule: int, digest: int) -> bool:
    """Whether the rule's cache has a sample."""
    return digest in shadows.rows and bool(shadows.held[shadows.rows[digest]] >> rule & 1)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches evict after each sample."""
    monkeypatch.setattr(module, "LEAST_SLACK", 0.0)
    monkeypatch.setattr(module, "SLACK_SHARE", math.inf)


@pytest.mark.usefixtures("one_by_one")
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
    assert shadows.lead(FREQUENCY, RECENCY)[0] == frequency - recency > 0
    assert shadows.lead(ROUNDS, RECENCY)[0] == rounds - recency
    assert shadows.lead(RECENCY, FREQUENCY)[0] == recency - frequency


@pytest.mark.usefixtures("one_by_one")
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
        assert shadows.lead(rule, RECENCY)[0] == fading - recency > 0

    assert shadows.turnover_s == 16.0
    ask(shadows, uses, 999, 600.0, capacity, turnover_s=20.0)
    assert shadows.turnover_s == 16.0
    ask(shadows, uses, 998, 601.0, capacity, turnover_s=100.0)
    assert shadows.turnover_s == 128.0


@pytest.mark.usefixtures("one_by_one")
def test_hits_of_one_request_are_one_piece_of_evidence() -> None:
    """Ten prefixes that one rule holds and that come back together count a hundred in its squares, not ten."""
    shadows, uses = Shadows(), {}
    for item in range(10):
        uses[item] = 1
        shadows.enter(item, 0.0, 5 << COUNT_SHIFT, 1.0)
    for item in range(10, 20):
        shadows.enter(item, 1.0, 1 << COUNT_SHIFT, 1.0)
    settle(shadows, 10, 1.0)
    for item in range(10):
        shadows.reused(item)
    settle(shadows, 10, 2.0)

    assert shadows.lead(FREQUENCY, RECENCY)[0] == 10
    assert shadows.lead(FREQUENCY, RECENCY)[1] == 100


@pytest.mark.usefixtures("one_by_one")
def test_changed_features_change_the_order() -> None:
    """What becomes worth more under a rule stays."""
    shadows = Shadows()
    for item in range(3):
        shadows.enter(item, float(item), 1 << COUNT_SHIFT, 1.0)
    shadows.changed(0, 9 << COUNT_SHIFT)
    settle(shadows, 2, 3.0)

    assert holds(shadows, FREQUENCY, 0)
    assert not holds(shadows, FREQUENCY, 1)
    assert not holds(shadows, RECENCY, 0)


@pytest.mark.parametrize("items", [20, 5000])
def test_memory_is_bounded(items: int) -> None:
    """By the capacity, whether everything fits and is used again and again or nothing does."""
    shadows = Shadows()
    uses: dict[int, int] = {}
    capacity = 40
    for now, item in enumerate(accesses(8000, items)):
        ask(shadows, uses, item, float(now), capacity)

    assert max(sizes(shadows)) <= capacity + 4
    assert len(shadows.rows) <= RULES * (capacity + 4)
    assert len(shadows.held) <= 3 * RULES * (capacity + 4) + 64


@pytest.mark.parametrize("is_between", [True, False])
def test_a_request_evicts_nothing_that_falls_due_with_it(*, is_between: bool) -> None:
    """It is done once, between two requests or else with the next one."""
    shadows = Shadows()
    for item in range(20):
        shadows.enter(item, float(item), 1 << COUNT_SHIFT, 1.0)
    shadows.settle(10, 20.0, Law(), 1.0, 1.0)

    assert sizes(shadows) == [20] * RULES
    if is_between:
        assert shadows.evict(10, 20.0, Law())
        assert not shadows.evict(10, 20.0, Law())
    else:
        shadows.settle(10, 21.0, Law(), 1.0, 1.0)
    assert max(sizes(shadows)) <= 10
    assert shadows.turn == RULES


def test_many_samples_are_evicted_by_one_rule_at_a_time() -> None:
    """So that nothing waits for all rules; few are by all rules at once."""
    found = []
    for count in (SMALL - 1, SMALL + 1):
        shadows = Shadows()
        for item in range(count):
            shadows.enter(item, float(item), 1 << COUNT_SHIFT, 1.0)
        settle(shadows, 100, 500.0)
        found.append(sum(size < count for size in sizes(shadows)))

    assert found == [RULES, 1]


def test_caches_have_their_capacity_on_average() -> None:
    """They evict to half of what they evict at once below it."""
    shadows, uses, capacity = Shadows(), dict[int, int](), 160
    seen = []
    for now in range(4000):
        ask(shadows, uses, now, float(now), capacity)
        seen.append(sizes(shadows)[RECENCY])

    assert capacity - 1 < sum(seen[1000:]) / len(seen[1000:]) < capacity + 1


@pytest.mark.parametrize("count", range(1, 8))
def test_lowest_are_the_least_and_of_equal_ones_the_first(count: int) -> None:
    """As a stable sort has them, where all weigh the same."""
    keys = np.array([3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 0.5])

    assert lowest(keys, np.ones(7), float(count)).tolist() == np.argsort(keys, kind="stable")[:count].tolist()


def test_lowest_weigh_as_much_as_is_wanted() -> None:
    """Or more by less than the last of them."""
    keys, weights = np.arange(6.0), np.array([1.0, 3.0, 1.0, 2.0, 1.0, 1.0])

    assert lowest(keys, weights, 3.5).tolist() == [0, 1]
    assert lowest(keys, weights, 4.5).tolist() == [0, 1, 2]
    assert lowest(keys, weights, 99.0).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_large_prefix_fills_its_cache_as_small_ones_together_do() -> None:
    """Of ten that weigh four each, five are left of a capacity of twenty."""
    shadows = Shadows()
    for item in range(10):
        shadows.enter(item, float(item), 1 << COUNT_SHIFT, 4.0)
    settle(shadows, 22, 10.0)

    assert sizes(shadows)[RECENCY] == 5
    assert shadows.total == 4.0 * len(shadows.rows)


@pytest.mark.usefixtures("one_by_one")
def test_evidence_fades() -> None:
    """A lead of ten is one of less than four after as many requests as it takes to fade to 1 / e."""
    shadows = Shadows()
    for item in range(20):
        shadows.enter(item, float(item), (5 if item < 10 else 1) << COUNT_SHIFT, 1.0)
    settle(shadows, 10, 20.0)
    for item in range(10):
        shadows.reused(item)
    settle(shadows, 10, 21.0)
    before = shadows.lead(FREQUENCY, RECENCY)[0]
    for _ in range(2000):
        settle(shadows, 10, 22.0, 1 - 1 / 50)

    assert before == 10
    assert shadows.lead(FREQUENCY, RECENCY)[0] == pytest.approx(10 * (1 - 1 / 50) ** 2000, rel=1e-6)


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
