"""Ranked policies: what a rank may be."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from services.scheduler.core.cache.eviction.ranked import RankedPolicy
from services.scheduler.core.cache.prefix_tree import Node
from shared.errors import InvariantViolated


class Given(RankedPolicy):
    """Ranks every node as a test wants."""

    name = "given"

    def rank(self, node: Node) -> Any:
        return given[0]


given: list[object] = [()]


@pytest.mark.parametrize("rank", [None, nan, (1, nan), (nan,), "a", ("a",), (None,), ((1, 2),), [1], 3])
def test_a_rank_that_would_hold_a_node_for_ever_is_refused(rank: object) -> None:
    """None equals the rank of an unknown node, NaN not itself, and the rest cannot be compared or read back."""
    policy, node = Given(), Node(7, 0, b"")
    given[0] = rank

    with pytest.raises(InvariantViolated, match=r"policy 'given' ranks node 7 as .*; a rank is a tuple of numbers"):
        policy.offer(node)


@pytest.mark.parametrize("rank", [(), (0,), (1, 2.5), (inf,), (-inf, True), (10**400,)])
def test_any_tuple_of_numbers_is_a_rank(rank: object) -> None:
    """Infinity too: it can be compared, and equals itself."""
    policy, node = Given(), Node(7, 0, b"")
    given[0] = rank

    policy.offer(node)

    assert policy.latest == {7: rank}


def test_a_rank_that_becomes_no_number_is_refused_at_the_next_look() -> None:
    """Where the node comes to the top."""
    policy, node = Given(), Node(7, 0, b"")
    given[0] = (1,)
    policy.offer(node)
    given[0] = (nan,)

    with pytest.raises(InvariantViolated, match="policy 'given'"):
        policy.victim(lambda node_id: node, None)  # type: ignore[arg-type]
