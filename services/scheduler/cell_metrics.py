"""Metrics of the cell: from the core's status, and of the shell around the core."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.scheduler import cell_families
from shared import metrics
from shared.messages.status import CellStatus

INPUTS = metrics.counter("scheduler_inputs_total", "Inputs folded since this process started")
SKIPPED = metrics.counter("scheduler_inputs_skipped_total", "Stream messages that are no input")
STEP_FAILURES = metrics.counter("scheduler_step_failures_total", "Times that the core raised for an input")
DIVERGED = metrics.counter(
    "scheduler_folds_differed_total", "Times that this standby's outputs differed from those of the active scheduler"
)
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


class CellCollector(Collector):
    """Translates the latest status at each scrape; without a status, families have no samples."""

    def __init__(self) -> None:
        """Begin without a status; ``latest`` is set with each one, and to None at the end of a term."""
        self.latest: CellStatus | None = None

    def describe(self) -> Iterator[Metric]:
        """Yield the families without samples; the registry checks their names with them."""
        return (cell_families.empty_family(facts) for facts in cell_families.cell_facts())

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the latest status, or the families without samples where there is none."""
        status = self.latest
        if status is None:
            yield from self.describe()
            return
        for facts, reading in cell_families.CELL_GAUGES:
            yield cell_families.filled_family(facts, reading(status))
        yield from cell_families.counter_families(status.counters)
