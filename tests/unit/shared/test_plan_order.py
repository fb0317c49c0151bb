"""Numbered plans are handed out in order, each once, whatever order, repetition or loss they arrive with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.plan_order import PlanOrder


@dataclass(frozen=True)
class Plan:
    number: int
    epoch: int = 1
    incarnation: str = "inc-a"


def offer_all(order: PlanOrder[Plan], plans: list[Plan]) -> list[int]:
    return [due.number for plan in plans for due in order.offer(plan)]


@given(st.integers(1, 30).flatmap(lambda n: st.lists(st.integers(1, n), max_size=90)))
def test_each_plan_is_handed_out_once_and_in_order(numbers: list[int]) -> None:
    """Whatever arrives, what comes out is 1, 2, 3, ... up to the first number that never came."""
    order: PlanOrder[Plan] = PlanOrder("inc-a")
    given_numbers = set(numbers)
    expected = 0
    while expected + 1 in given_numbers:
        expected += 1

    out = offer_all(order, [Plan(number) for number in numbers])

    assert out == list(range(1, expected + 1))
    assert order.last == expected


@given(st.permutations(list(range(1, 13))), st.sets(st.integers(1, 12)))
def test_a_gap_names_exactly_the_numbers_before_the_lowest_plan_held(arrival: list[int], lost: set[int]) -> None:
    """Offering the missing numbers again and again until none is missing hands out everything."""
    order: PlanOrder[Plan] = PlanOrder("inc-a")

    out = offer_all(order, [Plan(number) for number in arrival if number not in lost])
    while order.missing is not None:
        assert set(order.missing) <= lost
        out += offer_all(order, [Plan(number) for number in order.missing])

    highest = max((number for number in arrival if number not in lost), default=0)
    assert out == list(range(1, highest + 1))


@given(st.lists(st.integers(1, 40), max_size=120), st.integers(1, 5))
def test_what_is_held_is_bounded(numbers: list[int], capacity: int) -> None:
    """A bounded order still never skips or repeats a number, and the rest can be offered again."""
    order: PlanOrder[Plan] = PlanOrder("inc-a", capacity=capacity)

    out = offer_all(order, [Plan(number) for number in numbers])
    out += offer_all(order, [Plan(number) for number in range(1, 41)])

    assert out == list(range(1, 41))


def test_the_highest_number_is_given_up_first() -> None:
    """When too many are held, those needed soonest stay."""
    order: PlanOrder[Plan] = PlanOrder("inc-a", capacity=2)

    offer_all(order, [Plan(5), Plan(3), Plan(4)])

    assert order.missing == range(1, 3)
    assert offer_all(order, [Plan(1), Plan(2)]) == [1, 2, 3, 4]
    assert order.counts.overflowed == 1


def test_plans_of_another_incarnation_are_dropped() -> None:
    """A plan for an earlier life of this target means nothing to this one."""
    order: PlanOrder[Plan] = PlanOrder("inc-b")

    assert offer_all(order, [Plan(1), Plan(2)]) == []
    assert order.counts.foreign == 2
    assert order.missing is None


def test_a_superseded_scheduler_is_not_obeyed() -> None:
    """After a plan of epoch 2, one of epoch 1 is dropped even if its number is due."""
    order: PlanOrder[Plan] = PlanOrder("inc-a")

    out = offer_all(order, [Plan(1, epoch=2), Plan(2, epoch=1), Plan(2, epoch=2)])

    assert out == [1, 2]
    assert order.counts.fenced == 1


def test_a_newer_epoch_replaces_a_plan_that_is_held() -> None:
    """Of two plans with one number the newer scheduler's counts."""
    order: PlanOrder[Plan] = PlanOrder("inc-a")
    order.offer(Plan(2, epoch=1))
    order.offer(Plan(2, epoch=3))

    due = order.offer(Plan(1, epoch=1))

    assert due == [Plan(1, epoch=1), Plan(2, epoch=3)]


def test_a_held_plan_is_fenced_when_its_turn_comes() -> None:
    """Epochs never go back along the numbers, so a held plan of an older epoch is asked for again."""
    order: PlanOrder[Plan] = PlanOrder("inc-a")
    offer_all(order, [Plan(2, epoch=1), Plan(3, epoch=2)])

    due = order.offer(Plan(1, epoch=2))

    assert due == [Plan(1, epoch=2)]
    assert order.missing == range(2, 3)


def test_a_capacity_below_one_is_refused() -> None:
    """An order that can hold nothing could never close a gap."""
    with pytest.raises(ValueError, match="capacity"):
        PlanOrder("inc-a", capacity=0)
