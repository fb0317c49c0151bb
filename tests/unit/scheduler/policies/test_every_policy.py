"""What every policy and schedule guarantees: the published contract, and more of those that are ours."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction.policy import Policy
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.policies.baselines.queue import GhostList
from services.scheduler.policies.baselines.sketch import FrequencySketch
from shared.messages.cell_events import CellConfig
from thermocline.testing import PolicyContract, ScheduleContract
from thermocline.testing.forest import Forest
from thermocline.testing.walks import CAPACITY, STEPS, perform, walk

NAMES = sorted(POLICIES)
CLASSICS = [name for name in NAMES if name != "thermocline"]  # Ours keeps records of more than nodes.


def contract_of(base: type[Any], name: str, **own: Any) -> dict[str, type[Any]]:
    """A class that pytest collects, by its name."""
    title = f"Test{base.__name__.removesuffix('Contract')}_{name.replace('-', '_')}"
    return {title: type(title, (base,), {"__doc__": f"{name} keeps the contract.", "__module__": __name__, **own})}


for _name in CLASSICS:
    globals().update(contract_of(PolicyContract, _name, policy=POLICIES[_name]))
for _name in sorted(SCHEDULES):
    globals().update(contract_of(ScheduleContract, _name, schedule=type(SCHEDULES[_name])))


class TestThermocline(PolicyContract):
    """It samples requests, and keeps 16,384 samples at most, evicted prefixes included."""

    policy = POLICIES["thermocline"]
    fixed_state_bytes = 2 * 2**20


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


def check_records(forest: Forest) -> None:
    """Records of nodes end with them; ghosts are at most twice the pool's tokens, with few void entries."""
    for part in parts_of(forest.policy):
        if isinstance(part, GhostList):
            assert part.tokens == sum(part.sizes.values()) <= 2 * CAPACITY
            assert part.sizes.keys() == part.numbers.keys()
            assert len(part.order) <= 2 * len(part.sizes) + 64
    assert all(records.keys() <= forest.nodes.keys() for records in records_of_nodes(forest.policy))


@pytest.mark.parametrize("name", CLASSICS)
def test_memory_of_what_left_is_bounded(name: str) -> None:
    """Behind every step of twenty walks."""
    for seed in range(20):
        walk(POLICIES[name], seed, after=check_records)


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


def test_walks_are_worth_walking() -> None:
    """They evict, cut, lock and take snapshots: a walk that did not would find nothing."""
    forest, random = Forest(make_policy("lru", CAPACITY, CellConfig())), Random(0)
    victims: list[int] = []
    for _ in range(3 * STEPS):
        perform(forest, random, victims)

    assert len(victims) > STEPS // 4
    assert forest.last_id > STEPS // 2
    assert len(forest.policies) == 2
