"""HotPrefix's eviction: the least priority of all leaves, by the paper's expression or the user's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.eviction import make_policy
from services.scheduler.core.cache.heat import parse
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.hotprefix import HotPrefixPolicy
from shared.messages.cell_events import CellConfig
from tests.present import present
from thermocline.testing.forest import Forest, digest_below, size

EXPRESSIONS = [
    "frequency + clock / length",
    "frequency * clock",
    "clock / length",
    "frequency / clock",
    "length / clock",
]


def priority(forest: Forest, expression: str, node: Node) -> tuple[float, int]:
    """The priority as it is now, and the last use."""
    frequency, clock = forest.hotness.lookup(node.digest)
    return parse(expression)(clock=clock, frequency=frequency, length=size(node)), node.last_use


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "ask", "new", "age", "split", "evict"]), st.integers(0, 50))))
def test_victim_has_the_least_priority_of_all_leaves(expression: str, steps: list[tuple[str, int]]) -> None:
    """Algorithm 1 with every leaf ranked anew for each eviction, whatever was used, split or aged since the offer."""
    forest = Forest(make_policy("hotprefix", 100, CellConfig(eviction_expression=expression)))
    for action, number in steps:
        nodes = list(forest.nodes.values())
        if action == "new":
            forest.ask(nodes[number % len(nodes)] if nodes and number % 3 else None, [number % 7, number % 5])
            forest.finish(0)
        elif action == "ask" and nodes:
            forest.ask(nodes[number % len(nodes)], [])
            forest.finish(0)
        elif action == "age":
            forest.hotness.ages += 1
        elif action == "split" and nodes:
            forest.split(nodes[number % len(nodes)])
        elif action == "evict" and nodes:
            least = min(priority(forest, expression, node) for node in forest.all_evictable())
            victim = forest.victim()
            assert victim is not None
            assert priority(forest, expression, victim) == least
            forest.drop(victim)


def test_frequency_outlives_an_eviction() -> None:
    """A prefix that was used often, went and came back once, is kept before one that was used twice."""
    forest = Forest(make_policy("hotprefix", 100, CellConfig()))
    for label, uses in ((0, 5), (4, 2)):
        for _ in range(uses):
            found = [node for node in forest.nodes.values() if node.digest == digest_below(1, label)]
            forest.ask(found[0] if found else None, [] if found else [label])
            forest.finish(0)
    often = next(node for node in forest.nodes.values() if node.digest == digest_below(1, 0))
    forest.drop(often)
    forest.ask(None, [0])
    forest.finish(0)

    assert present(forest.victim()).digest == digest_below(1, 4)


def test_what_got_hotter_without_an_offer_is_ranked_anew() -> None:
    """Another pool's requests heat a prefix as well; the victim is the one that is coldest now."""
    forest = Forest(make_policy("hotprefix", 100, CellConfig()))
    for label in (0, 4):
        forest.ask(None, [label])
        forest.finish(0)
    first, second = forest.nodes.values()
    forest.offer(present(forest.victim()))
    for node, uses in ((first, 2), (second, 5)):
        for _ in range(uses):
            forest.hotness.inserted(node.digest, 1)
    forest.offer(first)

    assert forest.victim() is first


def test_all_are_looked_up_again_when_the_filter_was_made_anew() -> None:
    """A filter that counts its agings from 0 again is another one, and what it says is what counts."""
    forest = Forest(make_policy("hotprefix", 100, CellConfig()))
    for label in (0, 4):
        forest.ask(None, [label])
        forest.finish(0)
    forest.hotness.ages = 5
    forest.offer(present(forest.victim()))
    forest.hotness.ages = 0
    forest.hotness._known = {forest.nodes[1].digest: (9, 0), forest.nodes[2].digest: (1, 0)}

    assert forest.victim() is forest.nodes[2]


def test_bad_expression_is_replaced_by_the_papers() -> None:
    """A fold that is told nonsense goes on."""
    policy = make_policy("hotprefix", 100, CellConfig(eviction_expression="import os"))

    assert isinstance(policy, HotPrefixPolicy)
    assert policy.expression == "frequency + clock / length"


def test_one_victim_ranks_a_part_of_very_many_leaves() -> None:
    """Leaves that piled up before the first eviction are ranked bit by bit, and each of them leaves in the end."""
    forest = Forest(make_policy("hotprefix", 4000, CellConfig()))
    for label in range(300):
        forest.ask(None, [label])
        forest.finish(0)
    policy = forest.policy
    assert isinstance(policy, HotPrefixPolicy)

    forest.drop(present(forest.victim()))
    assert 0 < len(policy.values) <= 64
    assert len(policy.fresh) >= 300 - 64
    for _ in range(299):
        forest.drop(present(forest.victim()))
    assert forest.victim() is None
    assert not policy.values
    assert not policy.groups
