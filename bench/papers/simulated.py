"""One simulated run as a row of a paper's table."""

from __future__ import annotations

import gc
import time
from typing import Any

from services.scheduler.core import Stamped
from shared.errors import InternalError
from thermocline.simulate.__main__ import GC_THRESHOLDS
from thermocline.simulate.cell import SimulatedCell
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import Workload

NS_PER_S = 1e9

Row = dict[str, Any]
"""Figures of one run: plain numbers, and the core's counters."""

KEPT_COUNTERS = (
    "batches_loading_bound",
    "bundle_hits",
    "host_refused_frequency_pages",
    "host_refused_hotness_pages",
    "preemptions",
    "promotions_started",
    "requests_deferred",
    "requests_put_aside",
)
"""Those that explain the tables; the others would only lengthen the results."""


def run(setup: Setup, workload: Workload) -> Row:
    """Simulate until everything is answered. Raises InternalError when something fails or is stuck."""
    gc.set_threshold(*GC_THRESHOLDS)
    simulation = Simulation(setup, workload)
    held = HeldShare(simulation.cell)
    simulation.cell.watch = held.look
    started = time.process_time()
    simulation.run()
    return row_of(simulation) | {"held_share": held.mean, "cpu_seconds": round(time.process_time() - started, 2)}


class HeldShare:
    """How much of the device running requests hold, so that no policy may give it up: mean over the core's inputs."""

    def __init__(self, cell: SimulatedCell) -> None:
        self._cell = cell
        self._sum = 0.0
        self._looks = 0

    def look(self, stamped: Stamped, outputs: list[Any]) -> None:
        """Called after every input; looks while requests run."""
        for worker in self._cell.state.workers.values():
            if worker.work.running:
                pool = worker.pool
                self._sum += 1 - (pool.free + pool.cached - pool.locked) / pool.total
                self._looks += 1

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._looks)


def row_of(simulation: Simulation) -> Row:
    """What the tables need. Seconds are simulated; ``backup_s`` and ``promotion_s`` are link time.

    They are apart only where the link is full duplex, as that of every profile with a GPU is.
    """
    figures = simulation.figures()
    if figures["failed"]:
        raise InternalError(f"requests failed: {figures['failed']}")
    links = [worker.link for worker in simulation.cell.workers.values()]
    tokens = max(1, figures["input_tokens"])
    return {
        "requests": figures["requests"],
        "seconds": figures["simulated_seconds"],
        "device_hit_ratio": figures["hit_tokens"]["device"] / tokens,
        "host_hit_ratio": figures["hit_tokens"]["host"] / tokens,
        "ttft_ms": figures["ttft_ms"]["mean"],
        "ttft_p90_ms": simulation.cell.figures.ttft_ms.quantile(0.9),
        "ttft_p99_ms": figures["ttft_ms"]["p99"],
        "requests_per_s": figures["throughput"]["requests_per_s"],
        "output_tokens_per_s": figures["throughput"]["output_tokens_per_s"],
        "computed_tokens": figures["computed_tokens"],
        "loaded_tokens": figures["loaded_tokens"],
        "evicted_tokens": figures["evicted_tokens"]["device"],
        "backed_up_tokens": figures["backed_up_tokens"],
        "promoted_tokens": figures["promoted_tokens"],
        "backup_s": sum(link.down.background_ns for link in links) / NS_PER_S,
        "promotion_s": sum(link.up.background_ns for link in links) / NS_PER_S,
        "load_s": figures["load_seconds"],
        "compute_s": figures["compute_seconds"],
        "stall_s": figures["stall_seconds"],
        "bubble_s": figures["bubble_seconds"],
        "bubble_tokens": figures["bubble_tokens"],
        "counters": {name: figures["counters"][name] for name in KEPT_COUNTERS if figures["counters"].get(name)},
    }
