"""Metrics of the cell: what the core's status says, and how the shell around it is doing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared import metrics
from shared.messages.status import CellStatus

INPUTS = metrics.counter("scheduler_inputs_total", "Inputs folded since this process started")
SKIPPED = metrics.counter("scheduler_inputs_skipped_total", "Stream messages that are no input")
OUTPUTS = metrics.counter("scheduler_outputs_total", "Plans and notices published")
STEP_SECONDS = metrics.histogram(
    "scheduler_step_seconds",
    "Time of one step of the core",
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0),
)
INPUT_AGE_SECONDS = metrics.histogram(
    "scheduler_input_age_seconds", "From the stream's timestamp of an input to the end of its step"
)
SNAPSHOT_BYTES = metrics.gauge("scheduler_snapshot_bytes", "Size of the last snapshot")
SNAPSHOT_PAUSE_SECONDS = metrics.gauge("scheduler_snapshot_pause_seconds", "Pause of the fold by the last snapshot")
UNCONFIRMED = metrics.gauge("scheduler_outputs_unconfirmed", "Outputs that the broker has not confirmed")


class CellCollector(Collector):
    """Translates the latest status at the time of a scrape."""

    def __init__(self) -> None:
        self.latest: CellStatus | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.latest
        if status is None:
            return
        for name, documentation, value in (
            ("queued_requests", "Waiting requests", status.queued),
            ("running_requests", "Admitted requests", status.running),
            ("tree_nodes", "Nodes of the prefix tree", status.nodes),
            ("workers", "Joined workers", len(status.workers)),
            ("storages", "Joined storages", len(status.storages)),
            ("scheduler_epoch", "Fencing epoch", status.epoch),
            ("scheduler_seq", "Last input folded", status.seq),
        ):
            yield GaugeMetricFamily(f"thermocline_{name}", documentation, value=value)
        pages = GaugeMetricFamily("thermocline_pool_pages", "Pages of a pool by use", labels=["owner", "tier", "state"])
        for pool in status.pools:
            for state, count in (("free", pool.free), ("cached", pool.cached), ("leased", pool.leased)):
                pages.add_metric([pool.owner, pool.tier, state], count)
        yield pages
        counters = CounterMetricFamily("thermocline_cell", "Counters of the core by name", labels=["counter"])
        for name, value in status.counters.items():
            counters.add_metric([name], value)
        yield counters
