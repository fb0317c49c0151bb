"""The core's timers as the shell keeps them."""

from __future__ import annotations

from services.scheduler.core import CancelTimer, SetTimer
from services.scheduler.timers import Timers


def test_due_timers_come_in_order_of_their_time_and_once() -> None:
    """Only what is due by now is taken, and it is gone then."""
    timers = Timers()
    timers.apply([SetTimer("late", 300), SetTimer("first", 100), SetTimer("second", 200)])

    early = timers.take_due(99)
    due = timers.take_due(200)
    again = timers.take_due(200)

    assert early == []
    assert due == [("first", 100), ("second", 200)]
    assert again == []
    assert timers.next_ns() == 300


def test_timer_set_again_moves() -> None:
    """The old time of a moved timer does not count."""
    timers = Timers()
    timers.apply([SetTimer("t", 100), SetTimer("t", 500)])

    assert timers.take_due(499) == []
    assert timers.take_due(500) == [("t", 500)]


def test_cancelled_timer_never_comes() -> None:
    """Cancelling forgets; cancelling what is unknown does nothing."""
    timers = Timers()
    timers.apply([SetTimer("t", 100), CancelTimer("t"), CancelTimer("unknown")])

    assert timers.next_ns() is None
    assert timers.take_due(1000) == []


def test_only_timer_outputs_count_as_a_change() -> None:
    """The loop is woken when there is something new to wait for."""
    timers = Timers()

    assert not timers.apply([])
    assert timers.apply([SetTimer("t", 1)])
    assert timers.apply([CancelTimer("t")])


def test_cancelled_timers_do_not_pile_up() -> None:
    """Ten thousand timers that were set and cancelled leave next to nothing behind."""
    timers = Timers()
    for number in range(10_000):
        timers.apply([SetTimer(f"t{number}", 10**9 + number), CancelTimer(f"t{number}")])

    assert len(timers) == 0
    assert len(timers._heap) < 100
