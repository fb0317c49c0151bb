"""What the queue-shaped policies do where only leaves can go."""

from __future__ import annotations

from services.scheduler.core.cache.eviction import make_policy
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.baselines.arc import ArcPolicy
from services.scheduler.policies.baselines.s3fifo import S3FifoPolicy
from services.scheduler.policies.baselines.two_q import TwoQueuePolicy
from shared.messages.cell_events import CellConfig
from tests.present import present
from thermocline.testing.forest import Forest


def forest_of(name: str, capacity: int) -> Forest:
    return Forest(make_policy(name, capacity, CellConfig()))


def serve(forest: Forest, deepest: Node | None, labels: list[int]) -> Node | None:
    """A request that is over at once; returns the deepest node of its path."""
    forest.ask(deepest, labels)
    last: Node | None = forest.running[-1]
    forest.finish(len(forest.running) - 1)
    return last


def evict(forest: Forest) -> Node:
    victim = forest.victim()
    assert victim is not None
    forest.drop(victim)
    return victim


def test_2q_evicts_a_chain_whose_time_is_over_from_below() -> None:
    """The newcomer queue passes the inner nodes of its oldest chain; they go next, though others entered since."""
    forest = forest_of("2q", 8)
    lowest = serve(forest, None, [0, 0, 0])
    assert lowest is not None
    chain = [node.id for node in forest.path(lowest)]
    serve(forest, None, [4, 4])

    assert [evict(forest).id for _ in range(3)] == chain[::-1]


def test_2q_moves_what_is_used_after_its_time_to_the_main_queue() -> None:
    """An inner node that the newcomer queue has passed is as good as a ghost: a use proves it."""
    forest = forest_of("2q", 8)
    lowest = serve(forest, None, [0, 0, 0])
    assert lowest is not None
    top = forest.path(lowest)[0]
    evict(forest)
    policy = forest.policy
    assert isinstance(policy, TwoQueuePolicy)
    was_passed = top.id in policy.passed.places

    serve(forest, top, [])

    assert was_passed
    assert top.id in policy.main.places


def test_2q_brings_a_ghost_back_to_the_main_queue() -> None:
    """What is asked for soon after its eviction is no newcomer any more."""
    forest = forest_of("2q", 8)
    serve(forest, None, [0, 0, 0])
    evicted = evict(forest)

    serve(forest, forest.nodes[evicted.parent], [0])

    returned = next(node for node in forest.nodes.values() if node.digest == evicted.digest)
    policy = forest.policy
    assert isinstance(policy, TwoQueuePolicy)
    assert returned.id in policy.main.places


def test_s3_fifo_moves_used_inner_nodes_on_with_the_rest() -> None:
    """Parents of what is in the main queue do not stay in the small one, where they would hold its share for good."""
    forest = forest_of("s3-fifo", 10)
    lowest = serve(forest, None, [0, 0, 0])
    assert lowest is not None
    chain = forest.path(lowest)
    for _ in range(2):
        serve(forest, lowest, [])
    serve(forest, None, [4])

    victim = evict(forest)

    policy = forest.policy
    assert isinstance(policy, S3FifoPolicy)
    assert victim not in chain
    assert all(node.id in policy.main.places for node in chain)


def test_arc_moves_its_target_towards_the_ghosts_that_return() -> None:
    """A newcomer that was evicted as used once asks for more recency, one that was used again for less."""
    forest = forest_of("arc", 6)
    policy = forest.policy
    assert isinstance(policy, ArcPolicy)
    serve(forest, None, [0])
    evict(forest)
    serve(forest, None, [0])
    after_recent = policy.target
    evict(forest)
    serve(forest, None, [0])

    assert after_recent == 1
    assert policy.target == 0


def test_sieve_passes_over_an_inner_node_until_the_next_round() -> None:
    """The hand has gone by when the node becomes a leaf, so a later arrival goes first."""
    forest = forest_of("sieve", 100)
    lowest = serve(forest, None, [0, 0])
    assert lowest is not None
    inner = forest.path(lowest)[0]
    later = serve(forest, None, [4])
    serve(forest, None, [8])

    assert evict(forest) is lowest
    assert evict(forest) is later
    assert inner.id in forest.nodes


def test_w_tinylfu_keeps_what_was_seen_more_often() -> None:
    """A newcomer that was seen once or as often does not displace what is here; one that was seen more does."""
    forest = forest_of("w-tinylfu", 12)
    old = [serve(forest, None, [label]) for label in (3, 7, 11)]
    for node in old:
        serve(forest, node, [])
    evict(forest)
    gone_to = []
    for _ in range(3):
        serve(forest, None, [15])
        gone_to.append("old" if evict(forest) in old else "newcomer")

    assert gone_to == ["newcomer", "newcomer", "old"]


def test_gdsf_prefers_to_keep_small_nodes() -> None:
    """Of two nodes used as often, the larger goes first, though it was used later."""
    forest = forest_of("gdsf", 100)
    small = serve(forest, None, [0])
    large = serve(forest, None, [3])

    assert [evict(forest), evict(forest)] == [large, small]


def test_gdsf_lets_old_fame_fade() -> None:
    """What was used often long ago falls behind newcomers as the clock rises with each eviction."""
    forest = forest_of("gdsf", 100)
    famous = serve(forest, None, [0])
    for _ in range(3):
        serve(forest, famous, [])
    evictions = 0
    while present(famous).id in forest.nodes and evictions < 20:
        serve(forest, None, [4])
        serve(forest, None, [8])
        evict(forest)
        evictions += 1

    assert evictions < 20
