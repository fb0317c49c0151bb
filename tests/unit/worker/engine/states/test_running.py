"""Slots of states within pages: a slot is used from the token that it is as of, and after a failed pass not at all."""

from __future__ import annotations

from services.worker.engine.states.running import NoSlots, RunningSlots

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
