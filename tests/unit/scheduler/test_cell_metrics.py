"""The cell's status as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from services.scheduler import core
from services.scheduler.cell_metrics import CellCollector
from tests.scripted_cell import scripted_cell


def test_scrape_shows_the_latest_status() -> None:
    """Pools, queues and the core's counters have one series each, with the status's numbers."""
    cell = scripted_cell(5)
    collector = CellCollector()
    registry = CollectorRegistry()
    registry.register(collector)
    before = generate_latest(registry).decode()

    collector.latest = core.status(cell.fold.state, "s")

    lines = generate_latest(registry).decode().splitlines()
    assert before == ""
    assert 'thermocline_cell_total{counter="requests_accepted"} 5.0' in lines
    assert "thermocline_queued_requests 0.0" in lines
    assert "thermocline_workers 1.0" in lines
    pages = [line for line in lines if line.startswith('thermocline_pool_pages{owner="w1"')]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in pages) == 64.0
