"""What every policy guarantees, in any tree: leaves only, no locks, all found, bounded memory, exact snapshots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction.policy import Policy
from services.scheduler.policies.baselines.queue import GhostList
from services.scheduler.policies.baselines.sketch import FrequencySketch
from shared.errors import CodecError
from shared.messages.cell_events import CellConfig
from tests.unit.scheduler.policies.forest import Forest

CAPACITY = 24

NAMES = sorted(POLICIES)
CLASSICS = [name for name in NAMES if name != "thermocline"]  # Ours keeps records of more than nodes.

operations = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "finish", "evict", "evict", "trim", "keep", "split", "drop", "snapshot"]),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=60,
)


def perform(forest: Forest, operation: str, first: int, second: int) -> None:
    """One operation on whatever the numbers pick."""
    nodes = list(forest.nodes.values())
    if operation == "ask":
        deepest = nodes[first % len(nodes)] if nodes and first % 5 else None
        labels = [(second + step) % 7 for step in range(second % 4)]
        make_room(forest, 4 * len(labels))
        forest.ask(deepest if deepest and deepest.id in forest.nodes else None, labels)
    elif operation == "finish" and forest.running:
        forest.finish(first % len(forest.running))
    elif operation in ("evict", "trim", "keep"):
        victim = forest.victim()
        if victim is None:
            return
        if operation == "keep":
            forest.offer(victim)  # Its backup failed, so it stays.
            return
        if operation == "trim":
            forest.split(victim)
        forest.drop(victim)
    elif operation == "split" and nodes:
        forest.split(nodes[first % len(nodes)])
    elif operation == "drop" and forest.all_evictable():
        evictable = forest.all_evictable()
        forest.drop(evictable[first % len(evictable)])
    elif operation == "snapshot":
        forest.snapshot()


def make_room(forest: Forest, tokens: int) -> None:
    """Evict while the pool is too full, as long as anything may go."""
    while forest.tokens() + tokens > CAPACITY and (victim := forest.victim()) is not None:
        forest.drop(victim)


def parts_of(value: Any) -> list[Any]:
    """A struct and all structs in its fields."""
    found = [value]
    for name in value.__struct_fields__:
        part = getattr(value, name)
        if isinstance(part, msgspec.Struct):
            found += parts_of(part)
    return found


def records_of_nodes(policy: Policy) -> list[dict[int, float | tuple[float, ...]]]:
    """Everything that a policy keeps by node id."""
    return [
        records
        for part in parts_of(policy)
        if not isinstance(part, GhostList | FrequencySketch)
        for name in part.__struct_fields__
        if isinstance(records := getattr(part, name), dict) and name != "groups"  # By values of nodes, not by nodes.
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(steps=operations)
def test_victims_are_unlocked_leaves_and_all_of_them_are_found(name: str, steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens, a victim is a leaf that nothing locks, there is one if any such leaf exists, and a policy
    read from a snapshot names the same.
    """
    forest = Forest(make_policy(name, CAPACITY, CellConfig()))
    for operation, first, second in steps:
        perform(forest, operation, first, second)
    while forest.running:
        forest.finish(0)
    remaining = len(forest.nodes)
    evicted = 0
    while (victim := forest.victim()) is not None:
        forest.drop(victim)
        evicted += 1

    assert evicted == remaining
    assert not forest.nodes


@pytest.mark.parametrize("name", CLASSICS)
@settings(max_examples=20)
@given(steps=operations)
def test_memory_of_what_left_is_bounded(name: str, steps: list[tuple[str, int, int]]) -> None:
    """Records of nodes end with them; ghosts are at most twice the pool's tokens, with few void entries."""
    forest = Forest(make_policy(name, CAPACITY, CellConfig()))
    for operation, first, second in steps:
        perform(forest, operation, first, second)

        for part in parts_of(forest.policy):
            if isinstance(part, GhostList):
                assert part.tokens == sum(part.sizes.values()) <= 2 * CAPACITY
                assert part.sizes.keys() == part.numbers.keys()
                assert len(part.order) <= 2 * len(part.sizes) + 64
        assert all(records.keys() <= forest.nodes.keys() for records in records_of_nodes(forest.policy))


@pytest.mark.parametrize("name", CLASSICS)
def test_heaps_do_not_grow_with_uses(name: str) -> None:
    """A node that is used and offered again a thousand times leaves no trail of void entries."""
    forest = Forest(make_policy(name, CAPACITY, CellConfig()))
    for label in range(3):
        forest.ask(None, [label])
        forest.finish(0)
    for _ in range(1000):
        forest.ask(forest.nodes[1], [])
        forest.finish(0)

    assert len(forest.policy.encode()) < 6000


@pytest.mark.parametrize("name", CLASSICS)
def test_both_parts_of_a_split_node_inherit_its_standing(name: str) -> None:
    """Of two equal nodes, one used often, the unused one goes first, though the used one was cut in two."""
    forest = Forest(make_policy(name, CAPACITY, CellConfig()))
    forest.ask(None, [3])
    forest.finish(0)
    forest.ask(None, [7])
    forest.finish(0)
    used, unused = forest.nodes[1], forest.nodes[2]
    for _ in range(6):
        forest.ask(used, [])
        forest.finish(0)
    upper = forest.split(used)
    forest.drop(used)

    # FIFO cares for no use, and 2Q for none while a node is new; both parts came before the other node.
    expected = upper if name in ("fifo", "2q") else unused
    assert forest.victim() is expected


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_has_the_name_and_the_pools_capacity(name: str) -> None:
    """A snapshot names a policy as the configuration does."""
    policy = make_policy(name, 77, CellConfig())

    assert policy.name == name
    assert policy.capacity == 77


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x81\xa8capacity\xa1x"])
def test_bytes_that_a_policy_did_not_make_are_refused(name: str, data: bytes) -> None:
    """With the name of the policy that was to read them."""
    with pytest.raises(CodecError, match=f"not a state of policy '{name}'"):
        POLICIES[name].decode(data)
