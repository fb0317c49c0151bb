"""The cell's status as metrics."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from services.scheduler import core
from services.scheduler.cell_metrics import CellCollector
from shared.messages.status import CellStatus
from shared.messages.worker_events import WorkerDraining
from tests.scripted_cell import scripted_cell, worker_joined


def scraped(status: CellStatus | None) -> list[str]:
    """Lines of a scrape that shows this status, or none yet."""
    collector = CellCollector()
    registry = CollectorRegistry()
    registry.register(collector)
    collector.latest = status
    return generate_latest(registry).decode().splitlines()


def test_scrape_shows_the_latest_status() -> None:
    """Pools, queues and the core's counters have one series each, with the status's numbers."""
    cell = scripted_cell(5)
    lines = scraped(core.status(cell.fold.state, "s"))

    assert all(line.startswith("#") for line in scraped(None))
    assert 'thermocline_cell_total{counter="requests_accepted"} 5.0' in lines
    assert "thermocline_queued_requests 0.0" in lines
    assert "thermocline_workers 1.0" in lines
    pages = [line for line in lines if line.startswith('thermocline_pool_pages{owner="w1"')]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in pages) == 64.0


def test_scheduling_is_told_in_base_units() -> None:
    """Times are in seconds, whatever the core counts in, and what never happened is 0."""
    cell = scripted_cell(3)
    counters = {"bubble_us": 1_500_000, "stall_us": 250_000, "deferral_ms": 40, "requests_deferred": 7}
    status = core.status(cell.fold.state, "s")
    lines = scraped(msgspec.structs.replace(status, counters=counters, in_flight_nodes=2))

    for line in (
        "thermocline_bubble_seconds_total 1.5",
        "thermocline_stall_seconds_total 0.25",
        "thermocline_deferral_seconds_total 0.04",
        "thermocline_deferrals_total 7.0",
        "thermocline_batches_loading_bound_total 0.0",
        'thermocline_transient_nodes{mark="in_flight"} 2.0',
        'thermocline_worker_requests{state="waiting",worker="w1"} 0.0',
        'thermocline_draining{worker="w1"} 0.0',
        "thermocline_deferred_requests 0.0",
    ):
        assert line in lines


def test_waiting_requests_are_told_by_reason() -> None:
    """Every waiting request is counted once: by what it waits for."""
    cell = scripted_cell(3)
    status = core.status(cell.fold.state, "s")
    lines = scraped(msgspec.structs.replace(status, queued=10, deferred=5, deferred_for_fetch=2, unplaced=1))

    found = [line.partition(" ") for line in lines if line.startswith("thermocline_num_requests_waiting")]
    assert {series.partition('"')[2].rstrip('"}'): float(value) for series, _, value in found} == {
        "capacity": 4.0,
        "deferral": 3.0,
        "fetch": 2.0,
        "no_worker": 1.0,
    }


def test_errors_are_told_by_code_and_pools_by_share() -> None:
    """Counters whose names end in an error code become one family, and a pool's pages a share."""
    cell = scripted_cell(3)
    status = core.status(cell.fold.state, "s")
    pool = msgspec.structs.replace(status.pools[0], total=64, free=16, cached=32, leased=16)
    counters = {"refused_queue_full": 3, "failed_deadline_exceeded": 2, "evicted_pages_host": 7}
    lines = scraped(msgspec.structs.replace(status, counters=counters, pools=(pool,)))

    for line in (
        'thermocline_requests_refused_total{code="queue_full"} 3.0',
        'thermocline_requests_failed_total{code="deadline_exceeded"} 2.0',
        'thermocline_evicted_pages_total{reason="policy",tier="host"} 7.0',
        'thermocline_kv_cache_usage_perc{owner="w1",tier="device"} 0.25',
        'thermocline_kv_cache_filled_ratio{owner="w1",tier="device"} 0.75',
    ):
        assert line in lines


def test_restorations_are_told_by_kind() -> None:
    """Predicted and observed time, and how far they are apart."""
    cell = scripted_cell(3)
    cell.fold.state.predictions.note("kv from disk", 1e6, 1.5e6)
    lines = scraped(core.status(cell.fold.state, "s"))

    for line in (
        'thermocline_restoration_predicted_seconds{kind="kv from disk"} 1.0',
        'thermocline_restoration_observed_seconds{kind="kv from disk"} 1.5',
        'thermocline_restorations{kind="kv from disk"} 1.0',
        'thermocline_restoration_bias{kind="kv from disk"} 0.5',
        'thermocline_restoration_error{kind="kv from disk"} 0.5',
    ):
        assert line in lines


def test_a_worker_that_drains_is_told() -> None:
    """From when it says so until it has left."""
    cell = scripted_cell(3)
    cell.put(worker_joined("w2", pages=64))
    cell.put(WorkerDraining(worker_id="w1", incarnation="one", grace_ms=1_000))
    lines = scraped(core.status(cell.fold.state, "s"))

    assert 'thermocline_draining{worker="w1"} 1.0' in lines
    assert 'thermocline_draining{worker="w2"} 0.0' in lines
