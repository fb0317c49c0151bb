"""The classics on fixed and on random traces of single blocks, against naive references and golden counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import services.scheduler.policies  # noqa: F401  They are what is tested.
from bench.blocks import BlockCache, BlockRequests
from services.scheduler.core.cache.eviction import POLICIES, make_policy
from shared.messages.cell_events import CellConfig
from tests.unit.scheduler.policies.baselines.references import REFERENCES
from thermocline.testing.exact_hotness import ExactHotness

BLOCK_TOKENS = 512


def fixed_trace() -> list[int]:
    """600 accesses: some items often, some seldom, and a scan in the middle; never to change."""
    trace, value = [], 12345
    for number in range(600):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        share = (value >> 16) / 2**15
        trace.append(1000 + number if 300 <= number < 340 else int(80 * share**3) + (number // 150) * 5)
    return trace


def policy_hits(name: str, trace: list[int], capacity: int) -> list[bool]:
    """Whether each access is a hit in a pool of ``capacity`` blocks."""
    policy = make_policy(name, capacity * BLOCK_TOKENS, CellConfig())
    cache = BlockCache(policy, capacity, ExactHotness(), block_tokens=BLOCK_TOKENS)
    requests = BlockRequests(BLOCK_TOKENS)
    for item in trace:
        requests.append([item])
    return [bool(cache.ask(request)) for request in requests.requests]


GOLDEN = {
    "fifo": (91, 182, 358),
    "lru": (106, 206, 366),
    "lfu": (85, 152, 352),
    "2q": (140, 204, 373),
    "slru": (133, 218, 357),
    "s3-fifo": (141, 217, 369),
    "sieve": (149, 220, 352),
    "arc": (158, 223, 373),
    "gdsf": (133, 204, 355),
    "w-tinylfu": (93, 196, 360),
    "hotprefix": (114, 202, 364),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_hits_of_the_fixed_trace(name: str) -> None:
    """The number of hits at capacities of 4, 12 and 40 blocks is what it always was."""
    trace = fixed_trace()

    found = tuple(sum(policy_hits(name, trace, capacity)) for capacity in (4, 12, 40))

    assert found == GOLDEN[name]


@pytest.mark.parametrize("capacity", [1, 2, 4, 12, 25, 40])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_every_access_of_the_fixed_trace_is_as_in_the_reference(name: str, capacity: int) -> None:
    """Not only the sum: each access hits or misses as the naive algorithm says."""
    trace = fixed_trace()

    assert policy_hits(name, trace, capacity) == REFERENCES[name](trace, capacity)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@settings(max_examples=60)
@given(trace=st.lists(st.integers(0, 14), max_size=90), capacity=st.integers(1, 11))
def test_every_access_of_any_trace_is_as_in_the_reference(name: str, trace: list[int], capacity: int) -> None:
    """The same on whatever trace is found."""
    assert policy_hits(name, trace, capacity) == REFERENCES[name](trace, capacity)


def test_every_policy_of_single_blocks_has_golden_hits() -> None:
    """A policy that is added gets a golden count."""
    assert set(POLICIES) - set(GOLDEN) <= {"thermocline"}
