"""Whose request a node was added for, and what the length of its answer tells the default policy."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.eviction.policy import Moment
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.labels import narrow
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.thermo.features import code_of
from services.scheduler.policies.thermo.fit import _departures, _fit_base
from services.scheduler.policies.thermo.law import AGE_BINS, ANSWERS, FEATURE_BITS, PACES, RHYTHMS
from services.scheduler.policies.thermocline import MOST_RUNNING, ThermoclinePolicy
from thermocline.testing.exact_hotness import ExactHotness


def at(seconds: int, admission: int) -> Moment:
    """The moment of something that happens for this admission."""
    return Moment(
        seq=admission, time_ns=int(seconds * 1e9), requests=admission, hotness=ExactHotness(), admission=admission
    )


def node(number: int, parent: int = 0, tokens: int = 16) -> Node:
    """A node of its own tokens under a parent, or under the root."""
    words = number.to_bytes(4, "little") * tokens
    digest = extend(root_digest("a"), words)
    return Node(id=number, parent=parent, label=narrow(words) or b"", record=written(digest, digest))


def context_of(policy: ThermoclinePolicy, one: Node) -> int:
    """The row of the request that used the node last."""
    return policy.prefixes.context[policy.prefixes.of_node(one.id)]


def numbers(policy: ThermoclinePolicy) -> list[int]:
    """The admissions that something refers to."""
    contexts = policy.prefixes.contexts
    return [number for number, users in zip(contexts.number, contexts.users, strict=True) if users]


def code_in(policy: ThermoclinePolicy, row: int) -> int:
    """Of a sample in the duel."""
    return int.from_bytes(policy.learner.duel.shadows.codes[8 * row : 8 * row + 8], "little")


def answer_class(policy: ThermoclinePolicy, one: Node) -> int:
    """As the node is ranked by it."""
    return code_of(policy.prefixes, policy.prefixes.of_node(one.id)) >> FEATURE_BITS & (ANSWERS - 1)


def test_node_belongs_to_the_request_that_computed_it() -> None:
    """Others were admitted since, behind the same prefix, and their prompts are of other lengths."""
    policy, shared, first, second = ThermoclinePolicy(), node(1), node(2, parent=1), node(3, parent=1)
    policy.visit([], 100, at(0, 7))
    policy.add(shared, at(0, 7))
    policy.visit([shared], 200, at(1, 8))
    policy.visit([shared], 300, at(2, 9))
    policy.add(first, at(3, 8))
    policy.add(second, at(3, 9))

    prompts = policy.prefixes.contexts.prompt
    assert [prompts[context_of(policy, one)] for one in (shared, first, second)] == [300, 200, 300]
    assert [policy.admission_of(one) for one in (shared, first, second)] == [9, 8, 9]


def test_node_for_nobody_belongs_to_whoever_used_its_parent() -> None:
    """What is loaded or promoted, also in a pool that was filled before any request."""
    policy, kept, shared, loaded = ThermoclinePolicy(), node(1), node(2), node(3, parent=2)
    policy.add(kept, at(0, 0))
    policy.visit([], 100, at(1, 7))
    policy.add(shared, at(1, 7))
    policy.visit([], 200, at(2, 8))
    policy.add(loaded, at(3, 0))

    assert [policy.admission_of(one) for one in (kept, shared, loaded)] == [0, 7, 7]


def test_request_that_only_an_evicted_prefix_remembers_is_known_when_it_comes_back() -> None:
    """A backup ends long after its request, whose prefixes were evicted: what it brings takes their place."""
    policy, short, longer = ThermoclinePolicy(), node(5, tokens=16), node(5, tokens=32)
    policy.visit([], 100, at(0, 1))
    policy.add(short, at(0, 1))
    policy.remove(short, at(1, 1))
    policy.ended(1, 40)
    policy.visit([], 200, at(2, 2))
    assert policy.check() == ""

    policy.add(longer, at(3, 1))

    contexts = policy.prefixes.contexts
    assert policy.prefixes.ghosts == 0
    assert policy.admission_of(longer) == 1
    assert contexts.answer[context_of(policy, longer)] == 40
    assert contexts.users[context_of(policy, longer)] == 1
    assert policy.check() == ""


def test_miscounted_requests_are_found() -> None:
    """The checker of a cell's invariants goes by it."""
    policy, one = ThermoclinePolicy(), node(1)
    policy.visit([], 100, at(0, 1))
    policy.add(one, at(0, 1))
    policy.prefixes.contexts.users[context_of(policy, one)] += 1

    assert "counted as {1: 4}" in policy.check()


def test_cell_of_many_years_still_evicts() -> None:
    """Admissions are counted for as long as a cell lives; what is evicted remembers its own."""
    policy, one, late = ThermoclinePolicy(), node(1), 2**40
    policy.visit([], 100, at(0, late))
    policy.add(one, at(0, late))
    policy.remove(one, at(1, late))
    policy.add(one, at(2, late))

    assert policy.admission_of(one) == late
    assert policy.check() == ""


def test_answer_is_known_once_its_request_has_ended() -> None:
    """And only of that request; an end of which nothing is known changes nothing."""
    policy, one, other = ThermoclinePolicy(), node(1), node(2)
    for number, added in ((1, one), (2, other)):
        policy.visit([], 100, at(number, number))
        policy.add(added, at(number, number))

    assert answer_class(policy, one) == 0
    policy.ended(1, 40)
    policy.ended(1, 4000)
    policy.ended(99, 4000)

    assert (answer_class(policy, one), answer_class(policy, other)) == (2, 0)
    assert list(policy.running) == [2]


def test_samples_of_the_duel_are_corrected_at_the_end() -> None:
    """They entered while the request ran."""
    policy, one = ThermoclinePolicy(capacity=64), node(1)
    policy.visit([], 16, at(0, 1))
    policy.add(one, at(0, 1))
    policy.visit([], 16, at(1, 2))
    (row,) = policy.learner.duel.shadows.rows.values()
    before = code_in(policy, row)

    policy.ended(1, 4000)

    assert code_in(policy, row) == before | 3 << FEATURE_BITS


def test_requests_that_never_end_are_given_up() -> None:
    """Their workers died. The oldest of too many goes, and nothing of it is held any more."""
    policy = ThermoclinePolicy()
    for number in range(1, MOST_RUNNING + 11):
        policy.visit([], 16, at(number, number))

    assert list(policy.running) == list(range(11, MOST_RUNNING + 11))
    assert sorted(numbers(policy)) == list(policy.running)


def test_what_is_known_of_an_age_is_taken_for_true_of_later_ones() -> None:
    """Reuses twice and half as often as due at the ages that were seen stay so beyond them, not in full."""
    seen, due = np.zeros((2, AGE_BINS)), np.zeros((2, AGE_BINS))
    due[:, :10] = 1000.0
    seen[:, :10] = [[2000.0], [500.0]]

    found = _departures(seen, due)

    assert np.allclose(found[:, 5], [2.0, 0.5], rtol=0.01)
    assert np.allclose(found[:, 20:], [[2.0], [0.5]], rtol=0.01)


def test_base_is_no_different_for_answers_that_are_not_known() -> None:
    """While a request runs nobody goes on from it. That says nothing about the time after its end."""
    events, exposure = np.zeros((RHYTHMS, AGE_BINS)), np.zeros((RHYTHMS, AGE_BINS))
    events[2 * PACES, :] = 100.0
    exposure[2 * PACES, :] = 1000.0
    exposure[0, :4] = 5000.0

    base = _fit_base(exposure, events)

    assert np.allclose(base[0, 10:], 0.1, rtol=0.2)
    assert np.allclose(base[2 * PACES, 10:], 0.1, rtol=0.2)
