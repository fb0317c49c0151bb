"""The restart policy: backoff grows, old deaths are forgotten, and there is an end to it."""

import pytest

from thermocline.supervisor.restarts import GiveUp, Refused, Restart, RestartPolicy
from thermocline.supervisor.up import RUNNING, STARTING

POLICY = RestartPolicy(initial_delay_s=1.0, factor=2.0, max_delay_s=5.0, window_s=100.0, max_restarts=4)


def test_delays_double_up_to_the_bound() -> None:
    """Each death within the window doubles the delay until the maximum."""
    deaths: tuple[float, ...] = ()
    delays = []
    for now in (10.0, 20.0, 30.0, 40.0):
        verdict = POLICY.judge(deaths, now, exit_code=1)
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
        deaths = (*deaths, now)

    assert delays == [1.0, 2.0, 4.0, 5.0]


def test_one_death_too_many_ends_it() -> None:
    """With ``max_restarts`` deaths in the window the next is the last."""
    verdict = POLICY.judge((10.0, 20.0, 30.0, 40.0), 50.0, exit_code=1)

    assert verdict == GiveUp("it ended 5 times within 100 s")


def test_deaths_before_the_window_are_forgotten() -> None:
    """After a quiet window the shortest delay applies again."""
    verdict = POLICY.judge((10.0, 20.0, 30.0, 40.0), 140.0, exit_code=-9)

    assert verdict == Restart(1.0)
    assert POLICY.recent((39.0, 40.0, 41.0), 140.0) == (41.0,)


def test_a_refusal_is_final_at_once() -> None:
    """Exit code 2 is never followed by a restart."""
    assert POLICY.judge((), 0.0, exit_code=2) == Refused()


def test_a_program_without_refusals_is_restarted_after_exit_code_2() -> None:
    """For the broker 2 is a crash like any other."""
    assert POLICY.judge((), 0.0, exit_code=2, refusal_code=None) == Restart(1.0)


def test_a_refusal_of_what_has_run_is_a_death_like_any_other() -> None:
    """A worker that finds /dev/shm full when it is started again must not end a cell that serves."""
    assert RUNNING.judge((), 0.0, exit_code=2) == Restart(RUNNING.initial_delay_s)
    assert STARTING.judge((), 0.0, exit_code=2) == Refused()


@pytest.mark.parametrize("exit_code", [0, 1, -15, -9])
def test_every_other_unasked_end_is_restarted(exit_code: int) -> None:
    """Even a clean exit is a death if nobody asked for it."""
    assert POLICY.judge((), 0.0, exit_code=exit_code) == Restart(1.0)
