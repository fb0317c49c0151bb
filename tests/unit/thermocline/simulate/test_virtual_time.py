"""Events, links and runs of decode steps: what makes virtual time go by."""

from __future__ import annotations

from typing import Any

import pytest

from thermocline.simulate.decode_run import DecodeRun, run_s, steps_until
from thermocline.simulate.events import EventQueue, to_ns
from thermocline.simulate.link import Channel, Link
from thermocline.simulate.timers import Timers


def test_events_come_in_order_of_time_and_then_of_being_planned() -> None:
    """Ties go to what was planned first, and what is due already comes now."""
    queue = EventQueue()
    seen: list[Any] = []
    queue.at(5, seen.append, "late")
    queue.at(3, seen.append, "first")
    queue.at(3, seen.append, "second")
    queue.at(3, lambda _: queue.at(1, seen.append, "overdue"))

    while queue.run_next():
        pass

    assert seen == ["first", "second", "overdue", "late"]
    assert queue.now_ns == 5


def test_time_is_whole_nanoseconds() -> None:
    """Some time is never no time."""
    assert to_ns(0) == 0
    assert to_ns(1e-12) == 1
    assert to_ns(1.5) == 1_500_000_000


def _drain(queue: EventQueue) -> None:
    while queue.run_next():
        pass


def test_background_copies_go_one_after_another() -> None:
    """The second copy begins when the first has ended."""
    queue = EventQueue()
    channel, ends = Channel(queue), []
    channel.copy(10, lambda took: ends.append((queue.now_ns, took)))
    channel.copy(5, lambda took: ends.append((queue.now_ns, took)))

    _drain(queue)

    assert ends == [(10, 10), (15, 5)]


def test_a_load_holds_background_copies_up() -> None:
    """A copy under way stands still while a load runs, and one that comes during a load waits for its end."""
    queue = EventQueue()
    channel, ends = Channel(queue), []
    channel.copy(10, lambda _: ends.append(queue.now_ns))
    queue.at(4, lambda _: channel.load(20))
    queue.at(50, lambda _: channel.load(20))
    queue.at(55, lambda _: channel.copy(10, lambda _: ends.append(queue.now_ns)))

    _drain(queue)

    assert ends == [30, 80]


@pytest.mark.parametrize(("full_duplex", "end"), [(True, 10), (False, 30)])
def test_backups_take_nothing_from_loads_on_a_full_duplex_link(full_duplex: bool, end: int) -> None:
    """Up and down are one channel only where the link is not full duplex."""
    queue = EventQueue()
    link, ends = Link(queue, full_duplex=full_duplex), []
    link.down.copy(10, lambda _: ends.append(queue.now_ns))
    link.up.load(20)

    _drain(queue)

    assert ends == [end]


def test_a_run_takes_as_long_as_its_steps() -> None:
    """The closed form is the sum over the steps."""
    assert run_s(0.01, 0.001, 5) == pytest.approx(sum(0.01 + 0.001 * step for step in range(5)))


@pytest.mark.parametrize("slope_s", [0.0, 1e-9, 3e-6, 2e-3])
def test_a_run_is_cut_at_the_first_step_that_reaches_a_time(slope_s: float) -> None:
    """The steps until a time end at it or after it, and one step fewer would end before it."""
    run = DecodeRun(start_ns=1_000, requests=3, first_s=0.013, slope_s=slope_s, steps=10_000)
    for time_ns in (1_000, 1_001, 13_001_000, 13_001_001, 500_000_000, 2_000_000_000):
        steps = steps_until(run, time_ns)

        assert run.end_ns(steps) >= time_ns
        assert steps == 1 or run.end_ns(steps - 1) < time_ns


def test_timers_fire_in_order_unless_cancelled_or_moved() -> None:
    """Each fires once, at the time that it was last set to."""
    queue, fired = EventQueue(), []
    timers = Timers(queue, lambda name: fired.append((queue.now_ns, name)))
    for name, at_ns in (("late", 50), ("gone", 10), ("moved", 20), ("early", 5)):
        timers.set(name, at_ns)
    timers.cancel("gone")
    timers.set("moved", 40)
    queue.at(30, lambda _: timers.set("new", 35))

    _drain(queue)

    assert fired == [(5, "early"), (35, "new"), (40, "moved"), (50, "late")]


def test_cancelled_timers_do_not_pile_up() -> None:
    """Ten thousand that were set and cancelled leave no more than a few events behind."""
    queue = EventQueue()
    timers = Timers(queue, lambda _: None)
    for number in range(10_000):
        timers.set(str(number), 1_000_000 + number)
        timers.cancel(str(number))

    assert len(timers._heap) < 100
    assert len(queue) == 1
