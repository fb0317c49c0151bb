"""Baseline schedules: which candidates a batch takes, and in which order."""

from services.scheduler.core import new_state
from services.scheduler.policies.baselines.fcfs import FirstComeFirstServed
from services.scheduler.policies.baselines.longest_prefix import LongestPrefix
from tests.unit.scheduler.core.queue.forming import candidate, form


def test_fcfs_takes_the_queue_as_it_is() -> None:
    """Load or no load, the order stands."""
    waiting = [candidate("a", 1000, 1), candidate("b", 0, 50), candidate("c", 900, 1)]

    assert form(new_state(), FirstComeFirstServed(), waiting) == ["a", "b", "c"]


def test_longest_prefix_first_within_a_priority() -> None:
    """More cached pages go first, equals in the order of the queue, and priorities before both."""
    waiting = [
        candidate("a", 0, 1, pages=1),
        candidate("b", 0, 1, pages=9),
        candidate("c", 0, 1, pages=9),
        candidate("d", 0, 1, priority=2),
    ]

    assert form(new_state(), LongestPrefix(), waiting) == ["d", "b", "c", "a"]
