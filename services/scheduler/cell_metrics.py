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
ACTIVE = metrics.gauge("scheduler_active", "1 of the active scheduler, 0 of a standby")
BEHIND = metrics.gauge("scheduler_behind_inputs", "Inputs of the stream that this scheduler has not folded yet")


_SCHEDULING = (
    ("deferrals", "requests_deferred", "Waits of requests for KV that another was about to bring", 1),
    ("deferred_tokens", "deferred_tokens", "Tokens that deferred requests were spared at the time", 1),
    ("deferral_seconds", "deferral_ms", "Time that requests were deferred", 1e-3),
    ("deferral_deadlines", "deferral_deadlines", "Deferrals that ended by their deadline", 1),
    ("bundle_hits", "bundle_hits", "Requests that joined a load of another in their batch", 1),
    ("requests_put_aside", "requests_put_aside", "Requests put aside because a batch was loading-bound", 1),
    ("requests_stolen", "requests_stolen", "Waiting requests that an idle worker took over", 1),
    ("batches", "batches_planned", "Batches sent", 1),
    ("batches_loading_bound", "batches_loading_bound", "Batches that load for longer than they compute", 1),
    ("prefill_planned_tokens", "prefill_tokens_planned", "Prompt tokens planned to be computed", 1),
    ("load_planned_tokens", "load_tokens_planned", "Tokens planned to be loaded from host memory", 1),
    ("batch_seconds", "compute_us", "Wall time of the steps of batches", 1e-6),
    ("load_seconds", "load_us", "Time of loads, first page to last", 1e-6),
    ("loaded_tokens", "loaded_tokens", "Tokens that batches loaded", 1),
    ("stall_seconds", "stall_us", "Time in which computation waited for a load", 1e-6),
    ("bubble_seconds", "bubble_us", "Time of decode steps that ran while a batch only loaded", 1e-6),
    ("bubble_tokens", "bubble_tokens", "Tokens sampled by such decode steps", 1),
    ("restored_tokens", "restored_tokens", "Tokens restored from state in the place of being computed", 1),
    ("restore_seconds", "restore_us", "Time of workers in which they restored them", 1e-6),
    ("restores_refused", "restores_refused", "Restorations that failed because state was not what was saved", 1),
    ("restorations_explored", "restorations_explored", "Trials of ways back that were slow when last measured", 1),
)
"""Counters of the core that have a metric of their own: its name, the counter's, what it counts, and its unit."""


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
            ("deferred_requests", "Waiting requests that wait for KV of another", status.deferred),
            ("running_requests", "Admitted requests", status.running),
            ("tree_nodes", "Nodes of the prefix tree", status.nodes),
            ("workers", "Joined workers", len(status.workers)),
            ("storages", "Joined storages", len(status.storages)),
            ("scheduler_epoch", "Fencing epoch", status.epoch),
            ("scheduler_seq", "Last input folded", status.seq),
        ):
            yield GaugeMetricFamily(f"thermocline_{name}", documentation, value=value)
        transient = GaugeMetricFamily("thermocline_transient_nodes", "Transient nodes by mark", labels=["mark"])
        transient.add_metric(["in_queue"], status.in_queue_nodes)
        transient.add_metric(["in_flight"], status.in_flight_nodes)
        yield transient
        requests = GaugeMetricFamily(
            "thermocline_worker_requests", "Requests of a worker by state", labels=["worker", "state"]
        )
        draining = GaugeMetricFamily("thermocline_draining", "1 for a worker that is about to leave", labels=["worker"])
        for worker in status.workers:
            draining.add_metric([worker.worker_id], float(worker.draining))
            requests.add_metric([worker.worker_id, "running"], worker.running)
            requests.add_metric([worker.worker_id, "waiting"], worker.waiting)
        yield requests
        yield draining
        pages = GaugeMetricFamily("thermocline_pool_pages", "Pages of a pool by use", labels=["owner", "tier", "state"])
        for pool in status.pools:
            for state, count in (("free", pool.free), ("cached", pool.cached), ("leased", pool.leased)):
                pages.add_metric([pool.owner, pool.tier, state], count)
        yield pages
        yield from _restorations(status)
        for name, counter, documentation, unit in _SCHEDULING:
            amount = status.counters.get(counter, 0) * unit
            yield CounterMetricFamily(f"thermocline_{name}", documentation, value=amount)
        counters = CounterMetricFamily("thermocline_cell", "Counters of the core by name", labels=["counter"])
        for name, value in status.counters.items():
            counters.add_metric([name], value)
        yield counters


_RESTORATIONS = (
    ("restoration_predicted_seconds", "Predicted time of restorations that are over", "predicted_seconds"),
    ("restoration_observed_seconds", "Observed time of the same", "observed_seconds"),
    ("restorations", "How many there were", "count"),
    ("restoration_bias", "Smoothed relative error of the prediction; above 0, it took longer", "bias"),
    ("restoration_error", "The same without its sign", "error"),
)
"""Gauges by the kind of restoration: name, what it is, and the status's field."""


def _restorations(status: CellStatus) -> Iterator[Metric]:
    for name, documentation, field in _RESTORATIONS:
        gauge = GaugeMetricFamily(f"thermocline_{name}", documentation, labels=["kind"])
        for found in status.restorations:
            gauge.add_metric([found.kind], getattr(found, field))
        yield gauge
