"""Waits between tries."""

import pytest

from shared.backoff import Backoff


@pytest.mark.parametrize(("chance", "waits"), [(0.0, [0.5, 1.0, 2.0, 2.5, 2.5]), (0.5, [0.75, 1.5, 3.0, 3.75, 3.75])])
def test_waits_double_up_to_a_bound_and_a_half_of_each_is_chance(chance: float, waits: list[float]) -> None:
    """None is longer than the bound, and none shorter than half of what it could be."""
    backoff = Backoff(1.0, 5.0, lambda: chance)

    assert [backoff.next_s() for _ in waits] == waits


def test_after_a_success_waits_are_short_again() -> None:
    """The next failure has nothing to do with those before."""
    backoff = Backoff(1.0, 8.0, lambda: 0.0)
    longest = [backoff.next_s() for _ in range(4)][-1]

    backoff.reset()

    assert (longest, backoff.next_s()) == (4.0, 0.5)


def test_two_processes_do_not_wait_for_equally_long() -> None:
    """Unless they are told what chance says, they draw it."""
    assert Backoff(1.0, 1.0).next_s() != Backoff(1.0, 1.0).next_s()
