"""Seeded walks in which the policy changes a node or two at a time, while everything else goes on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from services.scheduler.core.cache import eviction_orders
from services.scheduler.core.cache.eviction import POLICIES, Evictable, Moment, Policy
from services.scheduler.core.cache.residency import DEVICE
from shared.messages.cell_events import CellConfig, CellConfigured
from tests.stateful.cell_driver import GATEWAYS, NOISES, VARIANTS, CellDriver
from tests.stateful.walking import LOSSES, move, unmet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node

WALKS = 60

MUST_HAPPEN = (
    "backups_done",
    "evicted_pages_device",
    "evicted_pages_host",
    "finished_length",
    "hit_tokens_device",
    "hit_tokens_host",
    "storages_lost",
    "workers_lost",
    # What the walks themselves saw while a change of policy was under way.
    "a_change_over_another",
    "a_node_cut_meanwhile",
    "a_node_made_meanwhile",
    "a_pool_came_meanwhile",
    "a_pool_went_meanwhile",
    "a_restart_meanwhile",
    "an_eviction_meanwhile",
    "strict_in_force",
)


class StrictPolicy(Policy):
    """What was told first goes first. It hears of every node once, of nothing else, and of none too late."""

    name = "strict"

    known: dict[int, None] = {}

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        assert all(node.id in self.known for node in path)

    def add(self, node: Node, moment: Moment) -> None:
        assert node.id not in self.known
        self.known[node.id] = None

    def remove(self, node: Node, moment: Moment) -> None:
        del self.known[node.id]

    def split(self, upper: Node, lower: Node) -> None:
        assert lower.id in self.known
        assert upper.id not in self.known
        self.known[upper.id] = None

    def offer(self, node: Node) -> None:
        assert node.id in self.known

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        return next(filter(None, map(evictable, self.known)), None)


def check(driver: CellDriver) -> None:
    """Strict policies know what is resident in their pools; coming ones, as far as they were told."""
    state = driver.cell.state
    renewal = state.renewal
    for pool, order in state.orders.items():
        if isinstance(order, StrictPolicy):
            assert sorted(order.known) == resident(driver, pool)
    for pool, order in renewal.orders.items() if renewal is not None else ():
        if isinstance(order, StrictPolicy):
            assert renewal is not None
            assert sorted(order.known) == [node_id for node_id in resident(driver, pool) if node_id in renewal.told]


def resident(driver: CellDriver, pool: str) -> list[int]:
    """Ids of nodes that a pool holds."""
    tier, _, owner = pool.partition("/")
    nodes = driver.cell.state.tree.nodes.values()
    return sorted(node.id for node in nodes if owner in (node.device if tier == DEVICE else node.host))


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters, and how often it met what only walks with changes do."""
    chance = random.Random(seed)
    names = ["strict", "strict", *POLICIES]
    config = CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(1, 4),
        lease_tokens=chance.choice([1, 8]),
        min_host_load_tokens=1,
        max_attempts=6,
        **({name: chance.choice(values) for name, values in VARIANTS.items()} | {"policy": chance.choice(names)}),
    )
    driver = CellDriver(
        config,
        page_size=chance.choice([1, 4, 16]),
        workers=chance.randint(1, 3),
        pages=chance.choice([10, 16, 24, 80]),
        host_pages=chance.choice([6, 30, 60]),
        disk_chunks=chance.choice([0, 40]),
    )
    met: dict[str, int] = {}
    for _ in range(steps):
        state = driver.cell.state
        is_changing = state.renewal is not None
        before = dict(state.counters), state.tree.next_id, len(state.orders)
        point = chance.random()
        if point < 0.05:
            met["a_change_over_another"] = met.get("a_change_over_another", 0) + is_changing
            changed = msgspec.structs.replace(state.config, policy=chance.choice(names))
            driver.cell.feed(CellConfigured(config=changed))
        elif point < 0.25 and is_changing:
            driver.cell.fire("renew")
        elif point < 0.28:
            driver.trouble(chance.choice(LOSSES), chance.randrange(1000))
        elif point < 0.33:
            noise = chance.choice(NOISES)
            met["a_restart_meanwhile"] = met.get("a_restart_meanwhile", 0) + (is_changing and noise == "restart")
            driver.noise(noise, chance.randrange(1000))
        elif point < 0.6:
            driver.submit(
                [chance.randint(0, 1) for _ in range(chance.randint(1, 5))],
                chance.randint(0, 3),
                chance.randint(1, 6),
                gateway_id=chance.choice(GATEWAYS),
            )
        else:
            kinds = ["all", "worker", "worker", "heard", "storage", "storage", "fetch"]
            move(driver, chance, chance.choice(kinds), most_rounds=1)
        check(driver)
        if is_changing:
            _note(driver, before, met)
    driver.finish()
    check(driver)
    assert driver.cell.state.renewal is None
    return driver.cell.state.counters | met


def _note(driver: CellDriver, before: tuple[dict[str, int], int, int], met: dict[str, int]) -> None:
    state = driver.cell.state
    counters, next_id, pools = before
    grown = {name for name, count in state.counters.items() if count > counters.get(name, 0)}
    seen = {
        "a_node_cut_meanwhile": "victims_cut" in grown
        or any(node.children and node.id >= next_id for node in state.tree.nodes.values()),
        "a_node_made_meanwhile": state.tree.next_id > next_id,
        "a_pool_came_meanwhile": len(state.orders) > pools,
        "a_pool_went_meanwhile": len(state.orders) < pools,
        "an_eviction_meanwhile": bool({"evicted_pages_device", "evicted_pages_host"} & grown),
        "strict_in_force": any(isinstance(order, StrictPolicy) for order in state.orders.values()),
    }
    for name, is_so in seen.items():
        met[name] = met.get(name, 0) + is_so


def test_walks_with_changes_of_policy_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    monkeypatch.setitem(POLICIES, "strict", StrictPolicy)
    monkeypatch.setattr(eviction_orders, "RENEWAL_UNITS", 2)
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
