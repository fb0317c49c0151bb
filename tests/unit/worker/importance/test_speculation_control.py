"""When reading ahead stops and begins again."""

from __future__ import annotations

import pytest

from services.worker.importance.speculation import LayerOutcome
from services.worker.importance.speculation_control import ControlSettings, SpeculationControl

SETTINGS = ControlSettings(trial_outcomes=3, recency=0.5, waste_weight=1.0, pause_s=10.0, longest_pause_s=30.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def control(clock: Clock) -> SpeculationControl:
    return SpeculationControl(SETTINGS, clock)


def outcome(hits: int, *, wait_s: float = 0.0, layer: int = 1, price_s: float = 1.0) -> LayerOutcome:
    """100 bytes are needed and 100 read ahead; a byte takes ``price_s`` on demand and a second ahead."""
    return LayerOutcome(
        layer=layer,
        needed_bytes=100,
        speculated_bytes=100,
        hit_bytes=hits,
        on_demand_bytes=100 - hits,
        keys_s=0.0,
        wait_s=wait_s,
        on_demand_s=(100 - hits) * price_s,
        ahead_s=100.0,
    )


def test_it_goes_on_where_most_of_it_is_needed(control: SpeculationControl) -> None:
    """60 seconds saved outweigh 40 wasted."""
    for _ in range(20):
        control.record(outcome(60))

    assert control.wants(1)


def test_it_stops_where_most_of_it_is_not(control: SpeculationControl) -> None:
    """40 saved do not outweigh 60 wasted: known after a trial, not before."""
    for _ in range(2):
        control.record(outcome(40))
        assert control.wants(1)

    control.record(outcome(40))

    assert not control.wants(1)


def test_layers_are_judged_apart(control: SpeculationControl) -> None:
    """One that stops does not stop another."""
    for _ in range(3):
        control.record(outcome(10, layer=1))
        control.record(outcome(90, layer=2))

    assert (control.wants(1), control.wants(2), control.wants(3)) == (False, True, True)


def test_waiting_is_no_saving(control: SpeculationControl) -> None:
    """90 seconds of reading less 70 of waiting outweigh 10 wasted, and less 95 they do not."""
    for _ in range(3):
        control.record(outcome(90, wait_s=70.0))
    assert control.wants(1)

    for _ in range(3):
        control.record(outcome(90, wait_s=95.0))
    assert not control.wants(1)


def test_an_idle_link_wastes_nothing(clock: Clock) -> None:
    """With weight 0, whatever saves anything pays."""
    control = SpeculationControl(ControlSettings(trial_outcomes=3, waste_weight=0.0), clock)
    for _ in range(5):
        control.record(outcome(5))

    assert control.wants(1)


def test_it_tries_again_after_a_pause(control: SpeculationControl, clock: Clock) -> None:
    """The next trial decides anew, on its own outcomes alone."""
    for _ in range(3):
        control.record(outcome(0))
    clock.now = 9.9
    assert not control.wants(1)

    clock.now = 10.0
    assert control.wants(1)
    for _ in range(3):
        control.record(outcome(80))

    assert control.wants(1)


def test_it_says_how_many_layers_rest(control: SpeculationControl, clock: Clock) -> None:
    """Until the end of their pause."""
    for layer in (1, 2):
        for _ in range(3):
            control.record(outcome(40, layer=layer))
    control.record(outcome(90, layer=3))

    assert control.resting == 2
    clock.now += 1e6
    assert control.resting == 0


def test_pauses_double_up_to_a_bound_while_trials_fail(control: SpeculationControl, clock: Clock) -> None:
    """10, 20, 30, 30 seconds; a trial that succeeds resets them."""
    for pause in (10.0, 20.0, 30.0, 30.0):
        for _ in range(3):
            control.record(outcome(0))
        clock.now += pause - 0.5
        assert not control.wants(1)
        clock.now += 0.5
        assert control.wants(1)
    for _ in range(3):
        control.record(outcome(100))
    for _ in range(3):
        control.record(outcome(0))

    clock.now += 10.0
    assert control.wants(1)


def test_what_was_under_way_when_it_stopped_counts_no_more(control: SpeculationControl) -> None:
    """An outcome that comes during the pause neither ends nor prolongs it."""
    for _ in range(3):
        control.record(outcome(0))
    for _ in range(9):
        control.record(outcome(100))

    assert not control.wants(1)


def test_the_price_on_demand_is_measured(control: SpeculationControl) -> None:
    """Reads on demand that take twice as long as reading ahead make 40 hits worth 80 seconds, more than 60 wasted."""
    for _ in range(8):
        control.record(outcome(40, price_s=2.0))

    assert control.wants(1)


def test_layers_that_read_nothing_ahead_teach_the_price_too(control: SpeculationControl) -> None:
    """The first layer is always read on demand: what it took is known before the first guess is judged."""
    first = LayerOutcome(
        layer=0,
        needed_bytes=100,
        speculated_bytes=0,
        hit_bytes=0,
        on_demand_bytes=100,
        keys_s=0.0,
        wait_s=0.0,
        on_demand_s=10.0,
        ahead_s=0.0,
    )
    for _ in range(3):
        control.record(first)
        control.record(outcome(95, price_s=0.1))  # Ahead of time a byte takes ten times as long as on demand.
    assert control.wants(1)

    for _ in range(3):
        control.record(first)
        control.record(outcome(85, price_s=0.1))  # 8.5 seconds saved, 15 wasted.
    assert not control.wants(1)
