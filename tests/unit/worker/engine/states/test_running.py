"""Slots of states within pages: a slot is used from the token that it is as of, and after a failed pass not at all."""

from __future__ import annotations

import pytest

from services.worker.engine.states.running import (
    PAGES_A_SLOT,
    RUNNING_SLOTS,
    NoSlots,
    RunningSlots,
    pages_beside_slots,
    slots_over,
)

_A, _B, _C = ("a", 1), ("b", 1), ("c", 1)


def test_who_goes_on_begins_where_it_is() -> None:
    """The pass before has left the state as of just that token."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0)])
    slots.reached([(_A, 6)])

    assert slots.begin([(_A, 6)]) == [(6, 0)]


def test_a_repeated_pass_begins_with_the_page() -> None:
    """The first try may have written the slot."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0)])
    slots.reached([(_A, 6)])
    slots.begin([(_A, 6)])

    assert slots.begin([(_A, 6)]) == [(4, 0)]


def test_a_pass_that_ended_well_and_is_repeated_begins_with_the_page() -> None:
    """Its slot is as of its end, which is not where the repetition begins."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0)])
    slots.reached([(_A, 6)])
    slots.begin([(_A, 6)])
    slots.reached([(_A, 7)])

    assert slots.begin([(_A, 6)]) == [(4, 0)]


def test_another_attempt_does_not_go_on_from_the_slot_of_the_one_before() -> None:
    """It may have been computed elsewhere meanwhile."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0)])
    slots.reached([(_A, 6)])

    assert slots.begin([(("a", 2), 6)]) == [(4, 1)]


def test_the_request_not_computed_for_longest_loses_its_slot() -> None:
    """It begins with its page when it is computed again."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0), (_B, 0)])
    slots.reached([(_A, 6), (_B, 6)])
    slots.begin([(_A, 6)])
    slots.reached([(_A, 7)])

    assert slots.begin([(_C, 0)]) == [(0, 1)]
    assert slots.begin([(_A, 7)]) == [(7, 0)]
    assert slots.begin([(_B, 6)]) == [(4, 1)]


def test_requests_of_one_pass_never_share_a_slot() -> None:
    """Where there are more than slots, some have none: their next pass begins with the page."""
    slots = RunningSlots(page_size=4, slots=2)

    begun = slots.begin([(_A, 0), (_B, 5), (_C, 6)])

    assert begun == [(0, 0), (4, 1), (4, -1)]


def test_pages_of_one_token_make_nobody_begin_earlier() -> None:
    """Every token is the beginning of a page."""
    assert RunningSlots(page_size=1, slots=1).begin([(_A, 5)]) == [(5, 0)]


def test_without_states_everybody_begins_where_it_is() -> None:
    """Models whose layers keep K and V alone pay nothing."""
    slots = NoSlots()
    slots.reached([(_A, 6)])

    assert slots.begin([(_A, 6), (_B, 3)]) == [(6, -1), (3, -1)]


def test_only_who_is_where_its_slot_is_goes_on() -> None:
    """And asking changes nothing."""
    slots = RunningSlots(page_size=4, slots=2)
    slots.begin([(_A, 0), (_B, 0)])
    slots.reached([(_A, 6), (_B, 8)])

    assert slots.go_on([(_A, 6), (_B, 8)])
    assert not slots.go_on([(_A, 6), (_B, 7)])
    assert not slots.go_on([(_C, 8)])
    assert slots.begin([(_A, 6)]) == [(6, 0)]
    assert not slots.go_on([(_A, 6)])
    assert NoSlots().go_on([(_A, 3)])


@pytest.mark.parametrize("slot_bytes", [0, 1, 700, 5000, 900_000])
@pytest.mark.parametrize("nbytes", [0, 900, 12_000, 99_999, 10_000_000, 10**10])
def test_pages_and_slots_take_the_memory_that_there_is(nbytes: int, slot_bytes: int) -> None:
    """With as many more as have a slot they would exceed it."""

    def taken(pages: int) -> int:
        return pages * 1000 + (slots_over(pages, "cuda") + 1) * slot_bytes

    pages = pages_beside_slots(nbytes, 1000, slot_bytes)

    assert pages == 0 or taken(pages) <= nbytes
    assert taken(pages + PAGES_A_SLOT) > nbytes


def test_a_gpu_has_fewer_slots_than_a_cpu() -> None:
    """There they take memory whether they are used or not."""
    assert (slots_over(100, "cpu"), slots_over(100, "cuda")) == (100, 100 // PAGES_A_SLOT)
    assert (slots_over(3, "cuda"), slots_over(10**6, "cuda"), slots_over(10**6, "cpu")) == (
        1, RUNNING_SLOTS, RUNNING_SLOTS,
    )  # fmt: skip
