"""Pools of one tier that learn together: who leads, who follows, and what is left when the leader goes."""

from __future__ import annotations

from services.scheduler.core.cache.eviction import Moment
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.thermo.learner import FIRST_FIT, NOBODY
from services.scheduler.policies.thermo.rules import FREQUENCY
from services.scheduler.policies.thermocline import ThermoclinePolicy
from thermocline.testing.exact_hotness import ExactHotness

HOTNESS = ExactHotness()


def moment(number: int) -> Moment:
    """At this request, one a second."""
    return Moment(number, number * 10**9, number, HOTNESS, admission=number)


def ask(policy: ThermoclinePolicy, number: int) -> None:
    """A request with one node that was never seen."""
    policy.visit([], 64, moment(number))
    node = Node(id=number, parent=0, label=bytes(192), record=written(number, number))
    policy.add(node, moment(number))
    policy.ended(number, 8)


def pools(count: int) -> list[ThermoclinePolicy]:
    """So many pools of a tier, made one after another."""
    made: list[ThermoclinePolicy] = []
    for _ in range(count):
        policy = ThermoclinePolicy(capacity=6400)
        policy.join(made)
        made.append(policy)
    return made


def test_only_the_leader_is_sampled() -> None:
    """What other pools are asked costs them no sample, no shadow and no fit."""
    leader, follower = pools(2)
    for number in range(1, 11):
        ask(leader, number)
    samples, shadows = leader.learner.law.samples.count(), len(leader.learner.duel.shadows.rows)

    for number in range(11, 21):
        ask(follower, number)

    assert (leader.leads, follower.leads) == (True, False)
    assert samples > 0 < shadows
    assert leader.learner.law.samples.count() == samples
    assert len(leader.learner.duel.shadows.rows) == shadows


def test_all_rank_by_the_rule_that_the_leader_found() -> None:
    """A rule that wins the leader's duel is in force in the other pools from their next request on."""
    leader, follower = pools(2)
    for number in range(1, 4):
        ask(follower, number)
    leader.learner.duel.rule = FREQUENCY

    ask(follower, 4)

    assert follower.ranking.rule == FREQUENCY


def test_pool_that_sees_twice_as_many_requests_leads() -> None:
    """The first pool of a cell may be one that nobody asks."""
    first, second, third = pools(3)
    ask(first, 1)
    for number in range(2, 3 + FIRST_FIT):
        ask(second, number)
    before = second.leads

    ask(second, 30)
    ask(third, 31)

    assert not before
    assert [policy.leads for policy in (first, second, third)] == [False, True, False]


def test_busiest_pool_inherits_what_a_lost_leader_knew() -> None:
    """It goes on with the law and the duel; what the lost pool watched is lost sight of."""
    leader, idle, busy = pools(3)
    for number in range(1, 11):
        ask(leader, number)
    for number in range(11, 14):
        ask(busy, number)

    leader.leave([idle, busy])
    samples = busy.learner.law.samples
    _, ages, _ = samples.ages(0, samples.count(), 1e6)

    assert (idle.leads, busy.leads) == (False, True)
    assert busy.learner is leader.learner
    assert samples.count() > 0
    assert ages.max() <= 13.0


def test_followers_leave_the_learner_out_of_their_bytes_and_find_it_again() -> None:
    """A snapshot holds what was learned once, and pools that were decoded share it as before."""
    members = pools(3)
    for number in range(1, 40):
        ask(members[number % 2], number)

    encoded = [policy.encode() for policy in members]
    decoded = [ThermoclinePolicy.decode(data) for data in encoded]
    alone = [policy.learner.leader for policy in decoded]
    for policy in decoded:
        policy.join(decoded)

    assert alone == [0, NOBODY, NOBODY]
    assert all(policy.learner is decoded[0].learner for policy in decoded)
    assert [policy.member for policy in decoded] == [0, 1, 2]
    assert [policy.encode() for policy in decoded] == encoded


def test_pool_that_comes_later_gets_a_number_of_its_own() -> None:
    """Nobody leads by the number of one that has gone."""
    members = pools(3)
    newcomer = ThermoclinePolicy(capacity=6400)

    members.pop().leave(members)
    newcomer.join(members)

    assert newcomer.member == 3
    assert not newcomer.leads
