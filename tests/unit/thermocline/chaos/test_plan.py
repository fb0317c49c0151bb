"""Plans of faults follow from their seed."""

from typing import get_args

from thermocline.chaos.plan import WEIGHTS, Kind, draw_plan, group_of

NAMES = ("nats", "scheduler", "storage", "worker-0", "worker-1", "gateway")


def test_a_seed_gives_the_same_plan_again() -> None:
    """And another seed another one."""
    assert draw_plan(3, 50, NAMES, heartbeat_lost_s=3) == draw_plan(3, 50, NAMES, heartbeat_lost_s=3)
    assert draw_plan(3, 50, NAMES, heartbeat_lost_s=3) != draw_plan(4, 50, NAMES, heartbeat_lost_s=3)


def test_a_longer_plan_begins_as_the_shorter_one_does() -> None:
    """So that a violation at fault 200 of 500 is found again by asking for 201."""
    assert draw_plan(3, 80, NAMES, heartbeat_lost_s=3)[:50] == draw_plan(3, 50, NAMES, heartbeat_lost_s=3)


def test_a_few_hundred_faults_are_of_every_kind_and_hit_everybody() -> None:
    """No weight is so small that a kind hardly comes."""
    plan = draw_plan(1, 500, NAMES, heartbeat_lost_s=3)

    assert {fault.kind for fault in plan} == set(get_args(Kind))
    assert {(fault.kind, group_of(fault.target)) for fault in plan} == {(kind, group) for kind, group, _ in WEIGHTS}
    assert {fault.target for fault in plan} == set(NAMES)


def test_long_stops_are_longer_than_the_limit_and_short_ones_well_within() -> None:
    """One is taken for dead, the other must not be."""
    plan = draw_plan(1, 500, NAMES, heartbeat_lost_s=3)

    assert all(fault.seconds > 3 for fault in plan if fault.kind == "stop_long")
    assert all(0 < fault.seconds < 2 for fault in plan if fault.kind == "stop_short")


def test_faults_come_one_after_another_at_the_rate_that_was_asked_for() -> None:
    """Times grow, and the mean pause is what was set."""
    plan = draw_plan(1, 400, NAMES, heartbeat_lost_s=3, pause_s=2.0)
    times = [fault.at_s for fault in plan]

    assert times == sorted(times)
    assert 1.8 < times[-1] / len(times) < 2.2


def test_a_process_that_the_cell_lacks_is_never_hit() -> None:
    """Kinds for which there is no target are drawn again."""
    assert {fault.target for fault in draw_plan(1, 100, ("worker-0",), heartbeat_lost_s=3)} == {"worker-0"}
