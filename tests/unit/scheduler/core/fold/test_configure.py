"""CellConfigured."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.policies.hotprefix import HotPrefixPolicy
from shared.messages.cell_events import CellConfig, CellConfigured
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.mark.parametrize(
    ("setting", "value", "unknown", "counter"),
    [
        ("policy", "sieve", "crystal-ball", "unknown_policies"),
        ("schedule", "fcfs", "lpm", "unknown_schedules"),
        ("admission", "selective", "picky", "unknown_admissions"),
        ("eviction_expression", "frequency", "frequency ** 2", "bad_expressions"),
        ("hotness_expression", "frequency", "frequency ** 2", "bad_expressions"),
    ],
)
def test_what_is_not_known_leaves_the_old_in_force(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, unknown: str, counter: str
) -> None:
    """It is counted, and the other settings apply."""
    cell = make_cell(**{setting: value})
    monkeypatch.delitem(SCHEDULES, "lpm")
    cell.feed(CellConfigured(config=structs.replace(CellConfig(max_running=3), **{setting: unknown})))

    in_force = {"policy": cell.state.policy}.get(setting, getattr(cell.state.config, setting))
    assert in_force == value
    assert cell.state.counters[counter] == 1
    assert cell.state.config.max_running == 3


def test_zeros_cannot_stall_the_cell(make_cell: MakeCell) -> None:
    """Settings of which none would mean that nothing ever runs are at least 1."""
    cell = make_cell()
    cell.feed(
        CellConfigured(
            config=CellConfig(max_batch_tokens=0, max_running=0, batches_ahead=0, lease_tokens=0, max_attempts=0)
        )
    )
    name = cell.serve([1, 2, 3])

    assert cell.gateways["gateway"].ended == {name: "finished"}


def test_a_bad_first_expression_leaves_the_default(make_cell: MakeCell) -> None:
    """There is always one in force that means something."""
    cell = make_cell(eviction_expression="")

    assert cell.state.config.eviction_expression == CellConfig().eviction_expression


def test_a_new_eviction_expression_takes_effect_at_once(make_cell: MakeCell) -> None:
    """Pools whose policy is made from it start anew; a change that a policy is not made from does not disturb it."""
    cell = make_cell(policy="hotprefix", pages=16)
    cell.serve([1, 2, 3, 4, 5])
    (before,) = cell.state.orders.values()
    cell.feed(CellConfigured(config=CellConfig(policy="hotprefix", max_running=3)))
    assert list(cell.state.orders.values()) == [before]
    assert next(iter(cell.state.orders.values())) is before

    cell.feed(CellConfigured(config=CellConfig(policy="hotprefix", eviction_expression="clock")))
    (after,) = cell.state.orders.values()
    assert isinstance(after, HotPrefixPolicy)
    assert after.expression == "clock"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"fingerprint_bits": 0, "clock_bits": 0, "frequency_bits": 0, "depth_bits": -1}, (4, 2, 2, 2)),
        ({"fingerprint_bits": 99, "clock_bits": 99, "frequency_bits": 99, "depth_bits": 99}, (32, 16, 32, 32)),
        ({"fingerprint_bits": 12, "clock_bits": 9, "frequency_bits": 17, "depth_bits": 3}, (12, 9, 17, 3)),
    ],
)
def test_widths_stay_within_what_the_filter_can_hold(
    make_cell: MakeCell, given: dict[str, Any], kept: tuple[int, int, int, int]
) -> None:
    """And the filter has them from then on, with a request under way and after it."""
    cell = make_cell()
    cell.submit([1, 2, 3, 4, 5])
    cell.feed(CellConfigured(config=CellConfig(**given)))
    cell.drain()
    hotness = cell.state.hotness

    assert (hotness.fingerprint_bits, hotness.clock_bits, hotness.frequency_bits, hotness.depth_bits) == kept


def test_senseless_numbers_become_the_nearest_that_work(make_cell: MakeCell) -> None:
    """Whatever an operator sends, requests run to their end."""
    cell = make_cell()
    cell.feed(
        CellConfigured(
            config=CellConfig(
                aging_requests=0,
                admission_frequency=-1,
                promotion_tokens=-1,
                defer_tokens=-1,
                defer_deadline_ms=0,
                load_compute_ratio=float("nan"),
                queue_window=0,
                max_queued=0,
                max_queued_per_tenant=-1,
                min_host_load_tokens=0,
                reserve_fraction=float("nan"),
            )
        )
    )
    name = cell.serve([1, 2, 3])

    assert cell.gateways["gateway"].ended == {name: "finished"}
    config = cell.state.config
    assert (config.aging_requests, config.defer_deadline_ms, config.queue_window, config.max_queued) == (1, 1, 1, 1)
    assert (config.admission_frequency, config.defer_tokens, config.max_queued_per_tenant) == (0, 0, 0)
    assert (config.load_compute_ratio, config.reserve_fraction) == (0.0, 0.0)


def test_a_bad_form_of_state_leaves_the_old_one(make_cell: MakeCell) -> None:
    """It is counted; a good one is taken."""
    cell = make_cell(hidden_form="1/0/0")
    cell.feed(CellConfigured(config=CellConfig(hidden_form="half/half")))
    assert (cell.state.config.hidden_form, cell.state.counters["bad_hidden_forms"]) == ("1/0/0", 1)

    cell.feed(CellConfigured(config=CellConfig(hidden_form="off", restoring="kv")))

    assert (cell.state.config.hidden_form, cell.state.config.restoring) == ("off", "kv")
