"""The table of reasons for which a request waits out of the ready order."""

from services.scheduler.core.lifecycle import DEFERRED, WAIT_TRANSITIONS, WaitEvent, WaitKind
from services.scheduler.core.waiting.waits import REASONS


def test_every_kind_of_deferral_has_a_row() -> None:
    """The two tables that a new reason is added to name the same kinds."""
    assert dict.fromkeys(REASONS).keys() == DEFERRED.keys()


def test_no_event_begins_two_kinds_of_deferral() -> None:
    """What begins a deferral says for what."""
    assert len(set(DEFERRED.values())) == len(DEFERRED)


def test_every_deferral_is_begun_from_the_queue_and_can_be_woken_or_moved() -> None:
    """A request that stands aside gets back to its turn, or out of the queue, and nowhere else."""
    for kind, event in DEFERRED.items():
        moves = {move: to for (found, move), to in WAIT_TRANSITIONS.items() if found is kind}

        assert WAIT_TRANSITIONS[WaitKind.TURN, event] is kind
        assert moves == {WaitEvent.WOKEN: WaitKind.TURN, WaitEvent.MOVED: WaitKind.NOWHERE}


def test_a_reason_that_is_indexed_can_be_left_again() -> None:
    """What begins an index of those who wait has what ends it."""
    for reason in REASONS.values():
        assert (reason.begin is None) == (reason.end is None)
