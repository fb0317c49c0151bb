"""The offline optimum: as good as trying everything, and never behind a policy that does not know the future."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache as memoised
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import services.scheduler.policies  # noqa: F401  They are simulated, too.
from bench.blocks import BlockCache, BlockRequest, BlockRequests
from bench.blocks_optimum import furthest_use
from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction.policy import Policy
from shared.messages.cell_events import CellConfig
from thermocline.testing.exact_hotness import ExactHotness

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=9)
more_prompts = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), max_size=40)


def requests_of(names: Iterable[Iterable[Any]]) -> list[BlockRequest]:
    found = BlockRequests(16)
    for prompt in names:
        found.append(prompt)
    return found.requests


def hits(policy: Policy, requests: list[BlockRequest], capacity: int) -> int:
    """Hit blocks under a policy."""
    cache = BlockCache(policy, capacity, ExactHotness(), block_tokens=16)
    return sum(cache.ask(request) for request in requests)


def best_of_all(requests: list[BlockRequest], capacity: int) -> int:
    """The most hits that any choice of leaves gives, by trying every one."""
    paths = [tuple(request.blocks) for request in requests]
    parents = {block: above for path in paths for above, block in zip((None, *path), path, strict=False)}

    @memoised
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        found = 0
        while found < len(path) and path[found] in resident:
            found += 1
        wanted = path[:capacity]
        return found + most_after(number, resident, frozenset(path[:found]), frozenset(wanted), len(wanted) - found)

    @memoised
    def most_after(
        number: int, resident: frozenset[int], own: frozenset[int], wanted: frozenset[int], missing: int
    ) -> int:
        if len(resident) + missing <= capacity:
            return best(number + 1, resident | wanted)
        inner = {parents[block] for block in resident}
        return max(
            most_after(number, resident - {leaf}, own, wanted, missing)
            for leaf in resident
            if leaf not in inner and leaf not in own
        )

    return best(0, frozenset())


@settings(max_examples=100)
@given(names=prompts, capacity=st.integers(1, 6))
def test_it_equals_an_exhaustive_search(names: list[list[int]], capacity: int) -> None:
    """On tiny workloads nothing that evicts leaves to make room finds more hits."""
    requests = requests_of(names)

    assert hits(furthest_use(requests), requests, capacity) == best_of_all(requests, capacity)


@settings(max_examples=100)
@given(name=st.sampled_from(sorted(POLICIES)), names=more_prompts, capacity=st.integers(1, 12))
def test_no_policy_finds_more_hits(name: str, names: list[list[int]], capacity: int) -> None:
    """Every online policy stays at or below it."""
    requests = requests_of(names)

    online = hits(make_policy(name, capacity * 16, CellConfig()), requests, capacity)

    assert online <= hits(furthest_use(requests), requests, capacity)


def test_what_is_never_used_again_goes_first() -> None:
    """Of three leaves the one without a future makes room, though it was used last."""
    requests = requests_of(["a", "b", "c", "d", "a", "b"])

    assert hits(furthest_use(requests), requests, 3) == 2
