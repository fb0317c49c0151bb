"""Seeded walks: the same seed draws the same events, so that two runs can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from services.scheduler.core.cache.eviction import Policy, make_policy
from services.scheduler.core.cache.prefix_tree import Node
from shared.messages.cell_events import CellConfig
from thermocline.testing.broken import require
from thermocline.testing.forest import Forest
from thermocline.testing.registered import registered

CAPACITY = 24
STEPS = 60

_OPERATIONS = ("ask", "ask", "ask", "finish", "evict", "evict", "trim", "keep", "split", "drop", "snapshot")


class Walked(NamedTuple):
    """The result of a walk: ids of victims in order, and the policy's bytes at its end."""

    victims: tuple[int, ...]
    data: bytes


def walk(
    policy: type[Policy], seed: int, *, steps: int = STEPS, after: Callable[[Forest], None] | None = None
) -> Walked:
    """Run ``steps`` random events on a pool of 24 tokens, then evict all remaining nodes.

    ``after`` is called with the pool after each step. Raises ContractBroken, and what the policy raises.
    """
    random = Random(seed)
    with registered(policy):
        forest = Forest(make_policy(policy.name, CAPACITY, CellConfig()))
    victims: list[int] = []
    for _ in range(steps):
        perform(forest, random, victims)
        if after is not None:
            after(forest)
    while forest.running:
        forest.finish(0)
    data, remaining, evicted = forest.policy.encode(), len(forest.nodes), len(victims)
    while (victim := _evict(forest, victims)) is not None:
        forest.drop(victim)
    require(len(victims) - evicted == remaining, f"{policy.name}: {len(forest.nodes)} of {remaining} nodes never leave")
    return Walked(tuple(victims), data)


def perform(forest: Forest, random: Random, victims: list[int]) -> None:
    """Run one random event; append the ids of the policy's victims to ``victims``."""
    operation = random.choice(_OPERATIONS)
    nodes = list(forest.nodes.values())
    if operation == "ask":
        deepest = random.choice(nodes) if nodes and random.random() < 0.8 else None
        labels = [random.randrange(7) for _ in range(random.randrange(4))]
        make_room(forest, 4 * len(labels), victims)
        forest.ask(deepest if deepest and deepest.id in forest.nodes else None, labels)
    elif operation == "finish" and forest.running:
        forest.finish(random.randrange(len(forest.running)))
    elif operation in ("evict", "trim", "keep"):
        victim = _evict(forest, victims)
        if victim is None:
            return
        if operation == "keep":
            forest.offer(victim)  # Its backup failed, so it stays.
            return
        if operation == "trim":
            forest.split(victim)
        forest.drop(victim)
    elif operation == "split" and nodes:
        forest.split(random.choice(nodes))
    elif operation == "drop" and forest.all_evictable():
        forest.drop(random.choice(forest.all_evictable()))
    elif operation == "snapshot":
        forest.snapshot()


def make_room(forest: Forest, tokens: int, victims: list[int]) -> None:
    """Evict until the pool has room for ``tokens`` more, or no node may leave."""
    while forest.tokens() + tokens > CAPACITY and (victim := _evict(forest, victims)) is not None:
        forest.drop(victim)


def _evict(forest: Forest, victims: list[int]) -> Node | None:
    victim = forest.victim()
    if victim is not None:
        victims.append(victim.id)
    return victim


def digest_of_walks(policy: type[Policy], seeds: int) -> str:
    """Return a digest of the results of ``seeds`` walks, to be compared between processes."""
    whole = hashlib.blake2b(digest_size=16)
    for seed in range(seeds):
        walked = walk(policy, seed)
        whole.update(repr(walked.victims).encode() + walked.data)
    return whole.hexdigest()
