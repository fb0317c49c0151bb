"""The default policy: repeatable, bounded, and better than recency where recency is wrong."""

from collections.abc import Iterator
from functools import cache
from math import log
from typing import Any

import msgspec
import numpy as np
import pytest

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.eviction.policy import Moment, Policy
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.labels import narrow
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.thermo.columns import ROWS, decoded, encoded
from services.scheduler.policies.thermo.fit import PARTS, Fit, gittins
from services.scheduler.policies.thermo.law import AGE_BINS, EDGES, LEVELS, Law, pack
from services.scheduler.policies.thermo.learner import MOST_LATER
from services.scheduler.policies.thermo.prefixes import start_digest
from services.scheduler.policies.thermo.ranking import SLICE, Ranking, _least
from services.scheduler.policies.thermo.rules import RECENCY, RULES
from services.scheduler.policies.thermocline import MOST_OFFERED, MOST_RUNNING, ThermoclinePolicy
from tests.present import present

BLOCK = 512
LABEL = b"\1\0\0" * BLOCK


class NoHotness:
    """Remembers nothing."""

    @property
    def ages(self) -> int:
        return 0

    def lookup(self, digest: int) -> tuple[int, int]:
        return 0, 0


class BlockCache:
    """A cache of equal blocks, closed upwards, that the policy under test keeps within its capacity."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy: Any = policy
        self.capacity = capacity
        policy.capacity = capacity * BLOCK
        self.nodes: dict[int, Node] = {}
        self.children: dict[int, int] = {}
        self.moment = Moment(seq=0, time_ns=0, requests=0, hotness=NoHotness())
        self.kept = 0
        self.hits = 0
        self.evicted: list[int] = []

    def evictable(self, node_id: int) -> Node | None:
        """A resident leaf that is not on the path of the request."""
        node = self.nodes.get(node_id)
        return node if node is not None and not self.children[node_id] and node_id != self.kept else None

    def request(self, seconds: float, blocks: list[int]) -> None:
        """Ask for a chain of blocks, each named by a positive number that stands for all of its prefix."""
        self.moment.seq += 1
        self.moment.requests += 1
        self.moment.time_ns = int(seconds * 1e9)
        found = 0
        while found < len(blocks) and blocks[found] in self.nodes:
            found += 1
        self.hits += found
        self.policy.visit([self.nodes[block] for block in blocks[:found]], len(blocks) * BLOCK, self.moment)
        self.kept = blocks[found - 1] if found else 0
        for depth in range(found, len(blocks)):
            while len(self.nodes) >= self.capacity and self.evict():
                pass
            if len(self.nodes) >= self.capacity:
                break
            self.insert(blocks[depth], blocks[depth - 1] if depth else 0, depth)
        if self.kept in self.nodes and not self.children[self.kept]:
            self.policy.offer(self.nodes[self.kept])
        self.kept = 0

    def insert(self, block: int, parent: int, depth: int) -> None:
        """A block becomes resident."""
        digest = block * 0x9E3779B97F4A7C15 % 2**64
        node = Node(id=block, parent=parent, label=LABEL, depth=depth * BLOCK, record=written(digest, digest))
        self.nodes[block], self.children[block] = node, 0
        if parent:
            self.children[parent] += 1
        self.policy.add(node, self.moment)
        self.kept = block

    def evict(self) -> bool:
        """Give up the block that the policy names; False when there is none."""
        node: Node | None = self.policy.victim(self.evictable, self.moment)
        if node is None:
            return False
        assert self.evictable(node.id) is node
        self.evicted.append(node.id)
        self.policy.remove(node, self.moment)
        del self.nodes[node.id]
        if node.parent:
            self.children[node.parent] -= 1
            if not self.children[node.parent] and node.parent != self.kept:
                self.policy.offer(self.nodes[node.parent])
        return True


class Pinned(ThermoclinePolicy, tag="pinned for comparison"):
    """The same policy that never duels."""

    rule: int = RECENCY

    def _settle(self) -> None:
        self.learner.duel.rule = self.rule


def chats(count: int, seed: int = 1) -> list[tuple[float, list[int]]]:
    """Conversations of a geometric number of turns, with exponential think times, in order of time."""
    state, fresh, events = seed, 1, []

    def chance() -> float:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 11) / 2**53

    for start in range(count):
        seconds, history = start * 1.0, [1]
        while True:
            grown = 1 + int(chance() * 6)
            history = [*history, *range(fresh + 1, fresh + grown + 1)]
            fresh += grown
            events.append((seconds, history))
            if chance() < 0.35:
                break
            seconds += 10 - 60 * log(1 - chance())
    return sorted(events)


def scan(documents: int, rounds: int, blocks: int = 10) -> Iterator[tuple[float, list[int]]]:
    """Documents in turn, again and again, each with a question of its own."""
    fresh = documents * blocks
    for number in range(documents * rounds):
        first = (number % documents) * blocks + 1
        yield float(number), [*range(first, first + blocks), fresh + number + 1]


def popular(requests: int, documents: int = 60, blocks: int = 4) -> Iterator[tuple[float, list[int]]]:
    """Documents of fixed popularity, each with a question of its own."""
    value, fresh = 7, documents * blocks
    for number in range(requests):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        first = int(documents * ((value >> 16) / 2**15) ** 2) * blocks + 1
        yield float(number), [*range(first, first + blocks), fresh + number + 1]


def run(policy: Policy, capacity: int, events: list[tuple[float, list[int]]]) -> BlockCache:
    """The cache after all events."""
    cache = BlockCache(policy, capacity)
    for seconds, blocks in events:
        cache.request(seconds, blocks)
    return cache


@cache
def unbroken() -> BlockCache:
    """After 300 conversations without a stop; tests only look at it."""
    return run(ThermoclinePolicy(), 120, chats(300))


WORKLOADS = {
    "chats": (80, chats(350)),
    "scan": (300, list(scan(60, 10))),
    "popular, small": (60, list(popular(1500))),
    "popular, half": (120, list(popular(900))),
}
"""Capacities in blocks, and events."""


@cache
def hits(workload: str, rule: int | None = None) -> int:
    """Of the policy, or of one that never leaves ``rule``."""
    return run(ThermoclinePolicy() if rule is None else Pinned(rule=rule), *WORKLOADS[workload]).hits


def test_snapshot_goes_on_with_the_same_victims() -> None:
    """A policy that was encoded and decoded midway evicts what one that never stopped does."""
    events = chats(300)
    cache = run(ThermoclinePolicy(), 120, events[:400])

    packed = cache.policy.encode()
    cache.policy = ThermoclinePolicy.decode(packed)
    for seconds, blocks in events[400:]:
        cache.request(seconds, blocks)

    assert cache.policy.learner.law.index
    assert cache.evicted == unbroken().evicted


def test_beats_recency_on_chats() -> None:
    """With think times and a cache that turns over faster, what was just used is not what comes next."""
    assert hits("chats") > 1.05 * hits("chats", RECENCY)


def test_keeps_a_part_of_a_cyclic_scan() -> None:
    """Where recency never hits, about the share that fits is kept."""
    assert hits("scan", RECENCY) == 0
    assert hits("scan") > 0.4 * 60 * 10 * 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_single_rule_is_ahead_by_much(workload: str) -> None:
    """Whichever rule suits a workload, choosing among them costs a few per cent of its hits at most."""
    assert hits(workload) > 0.95 * max(hits(workload, rule) for rule in range(RULES))


def test_state_is_bounded() -> None:
    """However many prefixes are seen, records, contexts and samples stay within their limits."""
    policy = ThermoclinePolicy()
    policy.prefixes.limit = 500
    policy.learner.law.samples.window = 400
    cache = BlockCache(policy, 100)
    for number in range(2500):
        cache.request(number * 0.1, [1, 2 * number + 2, 2 * number + 3])

    prefixes = policy.prefixes
    assert prefixes.resident() <= 100
    assert prefixes.ghosts <= 500
    assert len(prefixes.digest) <= 601 + ROWS
    assert len(prefixes.hopes) <= 100
    assert len(policy.offered) <= MOST_OFFERED
    assert len(policy.running) <= MOST_RUNNING
    assert len(prefixes.contexts.number) <= 601 + MOST_RUNNING + ROWS
    assert policy.learner.law.samples.count() <= 700
    assert len(policy.ranking.rows) <= 100
    assert len(policy.ranking.places) <= len(prefixes.digest) + ROWS
    assert len(policy.ranking.fresh) <= 200
    assert len(policy.learner.unlabelled) <= MOST_LATER + 1000
    assert len(policy.learner.later) <= MOST_LATER
    assert len(policy.learner.duel.shadows.rows) <= RULES * 100
    assert len(policy.learner.duel.entering) <= 64


def chain(name: str, *spans: bytes) -> list[Node]:
    """Nodes in a line under a root, with true digests."""
    digest, depth, nodes = root_digest(name), 0, []
    for number, tokens in enumerate(spans):
        digest = extend(digest, tokens)
        nodes.append(
            Node(
                id=10 + number,
                parent=9 + number,
                label=narrow(tokens) or b"",
                depth=depth,
                record=written(digest, digest),
            )
        )
        depth += len(tokens) // 4
    return nodes


def words(first: int, count: int) -> bytes:
    """Packed tokens that count up."""
    return b"".join(value.to_bytes(4, "little") for value in range(first, first + count))


def test_split_keeps_totals() -> None:
    """Both parts know the node's uses, and where they end."""
    policy, moment = ThermoclinePolicy(), Moment(seq=1, time_ns=0, requests=1, hotness=NoHotness())
    (whole,) = chain("a", words(0, 64))
    policy.visit([], 64, moment)
    policy.add(whole, moment)
    policy.visit([whole], 64, moment)
    policy.ended(2, 8)

    upper, lower = chain("a", words(0, 16), words(16, 48))
    upper.id, upper.parent, lower.id, lower.parent = 99, whole.parent, whole.id, 99
    policy.split(upper, lower)
    prefixes = policy.prefixes
    top, rest = (prefixes.of_node(node_id) for node_id in (99, whole.id))

    assert (prefixes.end[top], prefixes.end[rest]) == (16, 64)
    assert prefixes.count[top] == prefixes.count[rest] == 2
    assert prefixes.contexts.users[prefixes.context[top]] == 3  # The two parts, and the policy itself.


@pytest.mark.parametrize("cut", [(64,), (40, 24), (16, 8, 40)])
def test_evicted_history_is_recognised_however_it_is_cut_on_return(cut: tuple[int, ...]) -> None:
    """Two evicted turns that come back in other spans count as reuse."""
    policy, moment = ThermoclinePolicy(), Moment(seq=1, time_ns=0, requests=1, hotness=NoHotness())
    policy.visit([], 48, moment)
    old = chain("a", words(0, 32), words(32, 16))
    for node in old:
        policy.add(node, moment)
    for node in reversed(old):
        policy.remove(node, moment)

    moment.time_ns = 5_000_000_000
    policy.visit([], 64, moment)
    start, spans = 0, []
    for size in cut:
        spans.append(words(start, size))
        start += size
    for node in chain("a", *spans):
        policy.add(node, moment)

    contexts = policy.prefixes.contexts
    context = contexts.find(policy.requests)
    assert contexts.known[context] == 48
    assert contexts.turn[context] == 1
    assert contexts.pace[context] == pytest.approx(5.0, rel=0.01)


def test_digest_above_a_span_follows_from_its_own() -> None:
    """The polynomial can be undone."""
    (node,) = chain("a", words(7, 40))

    assert start_digest(node) == root_digest("a")


def test_cost_decides_between_equals() -> None:
    """With a cost that grows with depth the deeper node stays; a copy in a lower tier makes loss cheap."""
    policy = ThermoclinePolicy(cost_depth_tokens=1000.0, host_cost=0.1)
    shallow, deep = Node(id=1, parent=0, label=LABEL), Node(id=2, parent=0, label=LABEL, depth=4000)
    copied = Node(id=3, parent=0, label=LABEL, depth=4000, host=("node",))

    assert policy._cost(copied) < policy._cost(shallow) < policy._cost(deep)


def test_a_copy_that_another_node_lends_again_costs_what_that_costs() -> None:
    """Shared out among those who have it; a sole copy, and KV that is never lent, must be computed."""
    policy = ThermoclinePolicy(cost_depth_tokens=1000.0, lent_cost=0.5)
    sole, twice, sealed = (Node(id=number, parent=0, label=LABEL, depth=4000) for number in (1, 2, 3))
    sole.host, twice.host, sealed.host = ("a",), ("a", "b"), ("a", "b")
    sealed.set_rare(is_sealed=True)

    assert policy._cost(twice) == 0.25
    assert policy._cost(sole) == policy._cost(sealed) > 4.0
    policy.lent_cost = 1.0
    assert policy._cost(twice) == policy._cost(sole)


def test_index_looks_ahead_where_the_hazard_rises() -> None:
    """Waiting for a certain reuse is worth more the nearer it is; a falling hazard is worth what it is now."""
    law, fit = Law(), Fit()
    for number in range(200):
        sample = law.samples.open(float(number), float(number), pack((1,) * 9))
        law.samples.close(sample, number + 100.0, is_reused=True)
    assert fit.start(law, 400.0)
    while fit.stage:
        fit.advance(law)

    assert law.score_one(90.0, pack((1,) * 9)) > 2 * law.score_one(1.0, pack((1,) * 9))


def test_fit_goes_on_from_a_snapshot_between_any_two_slices() -> None:
    """A fit that is encoded and decoded after every slice ends with the same tables, byte for byte."""
    packed = unbroken().policy.encode()
    results = []
    for is_broken in (False, True):
        copy = ThermoclinePolicy.decode(packed)
        while copy.learner.fit.stage:
            copy.learner.fit.advance(copy.learner.law)
        copy.learner.law.index = b""
        assert copy.learner.fit.start(copy.learner.law, copy.clock)
        slices = 0
        while copy.learner.fit.stage:
            copy.learner.fit.advance(copy.learner.law)  # type: ignore[unreachable]  # Its start began another fit.
            slices += 1
            assert bool(copy.learner.law.index) == (
                not copy.learner.fit.stage
            )  # The new tables come into force all at once.
            if is_broken:
                copy = ThermoclinePolicy.decode(copy.encode())
        assert slices > 10
        results.append((slices, copy.encode()))

    assert results[0] == results[1]


def test_policy_goes_on_from_a_snapshot_in_the_middle_of_a_fit() -> None:
    """Wherever between two requests of a fit the snapshot is taken, the same nodes are evicted afterwards."""
    events = chats(300)
    cache = BlockCache(ThermoclinePolicy(), 120)
    broken = 0
    for seconds, blocks in events:
        cache.request(seconds, blocks)
        if cache.policy.learner.fit.stage and cache.moment.seq % 7 == 0:
            packed = cache.policy.encode()
            cache.policy = ThermoclinePolicy.decode(packed)
            broken += 1

    assert broken > 3
    assert cache.evicted == unbroken().evicted
    assert cache.policy.encode() == unbroken().policy.encode()


def test_a_request_does_not_wait_for_the_duel_s_caches() -> None:
    """They evict between requests; what is left is done by the next one, and requests decide as well."""
    policy = ThermoclinePolicy()
    cache = BlockCache(policy, 40)
    due = evicted = 0
    for number, (seconds, blocks) in enumerate(chats(400)):
        cache.request(seconds, blocks)
        shadows = policy.learner.duel.shadows
        held = bytes(shadows.held)
        is_due = shadows.turn < RULES
        due += is_due
        if number % 2:
            assert policy.prepare() or not is_due
            assert shadows.turn == RULES
            evicted += bytes(shadows.held) != held

    assert due > evicted > 10
    assert policy.learner.duel.shadows.is_full


def test_index_made_ahead_changes_neither_the_tables_nor_when_they_come_into_force() -> None:
    """Slices of the index that are made between requests are not made again, and the law is the same byte for byte."""
    packed = unbroken().policy.encode()
    results = []
    for is_ahead in (False, True):
        policy = ThermoclinePolicy.decode(packed)
        while policy.learner.fit.stage:
            policy.learner.fit.advance(policy.learner.law)
        while policy.prepare():
            assert not policy.learner.fit.stage
        assert policy.learner.fit.start(policy.learner.law, policy.clock)
        made, slices = 0, 0
        while policy.learner.fit.stage:
            while is_ahead and policy.prepare():  # type: ignore[unreachable]  # Its start began another fit.
                made += 1
            policy.learner.fit.advance(policy.learner.law)
            slices += 1
        assert bool(made) == is_ahead
        results.append((slices, policy.encode()))

    assert results[0] == results[1]


def test_gittins_index_is_zero_where_no_reuse_is_due() -> None:
    """Neither an empty tail nor a law without any reuse divides by zero."""
    base, edges = np.zeros(AGE_BINS), 2.0 ** (np.arange(EDGES) / 3) - 1
    base[:4] = 1e6  # Nothing survives the first bins.
    with np.errstate(all="raise", under="ignore"):
        index = gittins(base, edges, np.arange(LEVELS))

    assert index[LEVELS // 2, 0] == pytest.approx(1e6)
    assert not index[:, 4:].any()
    assert not np.signbit(index).any()


def test_gittins_index_is_the_best_ratio_of_all_stopping_ages() -> None:
    """Against the definition, start by start and stop by stop."""
    rng = np.random.default_rng(1)
    base, edges = np.exp(rng.normal(-6.0, 1.5, AGE_BINS)), 2.0 ** (np.arange(EDGES) / 3) - 1
    levels = np.arange(12, 21)
    index = gittins(base, edges, levels)

    for row, level in enumerate(levels):
        hazard = base * 2.0 ** ((level - LEVELS // 2) / 2)
        for start in range(0, AGE_BINS, 5):
            alive, reuses, occupied, best = 1.0, 0.0, 0.0, 0.0
            for age_bin in range(start, AGE_BINS):
                stays = np.exp(-hazard[age_bin] * (edges[age_bin + 1] - edges[age_bin]))
                reuses += alive * (1 - stays)
                occupied += alive * (1 - stays) / hazard[age_bin]
                alive *= stays
                best = max(best, reuses / occupied)
            assert index[row, start] == pytest.approx(best, rel=1e-9)
    assert PARTS > 1


def test_ranking_in_slices_takes_from_the_lowest() -> None:
    """With more nodes than one slice holds, victims come from the low end, and each node is named once."""
    ranking, law, count = Ranking(), Law(), 3 * SLICE
    for node_id in range(count):
        ranking.offer(1 + node_id, node_id, float(node_id * 7919 % count), 0, 1.0, float(count), law)
    victims = [ranking.lowest(float(count), 1 + number // 20, law) for number in range(2000)]

    assert len(set(victims)) == 2000
    ages = sorted(present(victim) * 7919 % count for victim in victims[400:])
    assert ages[len(ages) // 2] < 2 * 2000
    assert len(ranking.rows) == count - 2000


@pytest.mark.parametrize("count", [1, 7, 40, 100])
def test_line_is_made_of_the_least_scores_in_order_and_ties_go_by_id(count: int) -> None:
    """Whatever the scores are, the line is what sorting all of them begins with."""
    rng = np.random.default_rng(count)
    entries = [(float(rng.integers(12)), int(node_id), 1) for node_id in rng.permutation(60)]

    assert _least(entries, count) == sorted(entries)[:count]


def twin_of(ranking: Ranking) -> Ranking:
    """The same from its bytes."""
    data = msgspec.msgpack.encode(ranking, enc_hook=encoded)
    return msgspec.msgpack.decode(data, type=Ranking, dec_hook=decoded)


def test_ranking_goes_on_from_a_snapshot_between_slices() -> None:
    """What was scored before is not scored again, and the victims are the same."""
    ranking, law, count = Ranking(), Law(), 3 * SLICE
    for node_id in range(count):
        ranking.offer(1 + node_id, node_id, float(node_id * 7919 % count), 0, 1.0, float(count), law)
    found: list[list[int]] = []
    for is_broken in (False, True):
        copy = twin_of(ranking)
        found.append([])
        for request in range(1, 12):
            for _ in range(20):
                found[-1].append(present(copy.lowest(float(count), request, law)))
            copy.withdraw(1 + request * 100, request * 100)
            copy.offer(1 + count + request, count + request, float(request), 0, 1.0, float(count), law)
            if is_broken:
                copy = twin_of(copy)

    assert found[0] == found[1]
