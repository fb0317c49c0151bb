"""One simulation from its settings to its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ConfigError, InternalError
from shared.messages.cell_events import CellConfig
from thermocline.simulate.cell import CellShape, SimulatedCell
from thermocline.simulate.cost import Costs, Io, costs_of, device_kv_tokens, host_kv_tokens
from thermocline.simulate.events import NS_PER_S, EventQueue
from thermocline.simulate.profiles import HardwareProfile, ModelProfile
from thermocline.simulate.source import Source
from thermocline.simulate.workloads import Asked, TraceWorkload, Workload

PROGRESS_EVERY_EVENTS = 2048

Progress = Callable[[int, float], None]
"""Called every PROGRESS_EVERY_EVENTS events with the number of ended requests and the simulated seconds."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All settings of a simulation but its workload. Pools of None tokens take what fits in memory."""

    hardware: HardwareProfile
    model: ModelProfile
    config: CellConfig = field(default_factory=CellConfig)
    workers: int = 1
    workers_per_node: int = 8
    tensor_parallel: int = 1
    page_size: int = 16
    device_tokens: int | None = None
    host_tokens: int | None = None
    disk_tokens: int = 0
    network_gb_s: float = 0.0
    io: Io = "assisted"
    backup_share: float = 1.0
    rate: float | None = None
    in_flight: int | None = None
    requests: int | None = None
    seed: int = 1
    start_ns: int = 0  # Virtual time at the start.
    remembers: bool = False  # Keep records that explain the core's choices; they only cost time and memory.


class Simulation:
    """A cell and its workload. ``run`` it once, then read ``figures``."""

    def __init__(self, setup: Setup, workload: Workload) -> None:
        """Check the settings. Raises ConfigError for those that contradict each other or the profiles."""
        self.setup = setup
        self._workload = workload
        self.shape = shape_of(setup)
        self.queue = EventQueue(setup.start_ns)
        self.costs: Costs = costs_of(
            setup.hardware,
            setup.model,
            page_size=setup.page_size,
            tensor_parallel=setup.tensor_parallel,
            io=setup.io,
            backup_share=setup.backup_share,
        )
        self.cell = SimulatedCell(
            self.shape,
            setup.config,
            setup.hardware,
            setup.model,
            self.costs,
            self.queue,
            remembers=setup.remembers,
        )
        self.source = Source(
            workload,
            self.queue,
            self._send,
            rate=setup.rate,
            in_flight=setup.in_flight,
            limit=setup.requests,
            seed=setup.seed,
        )
        self.cell.answered = self._answered
        self._start_ns: int | None = None
        self._last_answer_ns = 0

    def run(self, progress: Progress | None = None) -> None:
        """Run until no event is left. Raises InternalError when requests are stuck.

        Errors of a policy from outside pass, with a note that names the policy.
        """
        try:
            self._run(progress)
        except Exception as error:
            error.add_note(f"while simulating policy {self.setup.config.policy!r}")
            raise

    def _run(self, progress: Progress | None) -> None:
        while self.queue.run_next():  # Workers and storages join first.
            pass
        self.source.start()
        handled = 0
        while self.queue.run_next():
            handled += 1
            if progress is not None and handled % PROGRESS_EVERY_EVENTS == 0:
                progress(self.ended, self.simulated_s)
        left = list(dict.fromkeys([*self.cell.open, *self.cell.state.requests]))
        if left:
            raise InternalError(
                f"nothing moves any more and {len(left)} requests are stuck, {left[0]} among them, under policy "
                f"{self.setup.config.policy!r}"
            )

    @property
    def simulated_s(self) -> float:
        """Seconds from the first request to the latest answer."""
        return 0.0 if self._start_ns is None else (self._last_answer_ns - self._start_ns) / NS_PER_S

    @property
    def warning(self) -> str | None:
        """Sentence about requests of a trace that were too late to be sorted; None for none."""
        return self._workload.warning if isinstance(self._workload, TraceWorkload) else None

    @property
    def ended(self) -> int:
        """Number of requests so far that were answered, or refused."""
        figures = self.cell.figures
        return figures.finished + sum(figures.failed.values())

    def _send(self, asked: Asked) -> None:
        if self._start_ns is None:
            self._start_ns = self._last_answer_ns = self.queue.now_ns
        self.cell.send(asked)

    def _answered(self, asked: Asked) -> None:
        self._last_answer_ns = self.queue.now_ns
        self.source.answered(asked)

    def figures(self) -> dict[str, Any]:
        """Return all figures for JSON. Seconds of workers are sums over all workers."""
        figures, state = self.cell.figures, self.cell.state
        seconds = max(self.simulated_s, 1e-9)
        workers = [worker.figures for worker in self.cell.workers.values()]
        stall_s = sum(worker.stall_s for worker in workers)
        busy_s = sum(worker.busy_s for worker in workers)
        hits = {"device": figures.device_tokens, "host": figures.host_tokens}
        if self.shape.disk_tokens:
            hits["disk"] = figures.disk_tokens
        if figures.neighbour_tokens:
            hits["neighbour"] = figures.neighbour_tokens
        if self.shape.network_gb_s:
            hits["lent"] = figures.lent_tokens
        counters, page_size = dict(sorted(state.counters.items())), self.setup.page_size
        scheduler_s = self.cell.inputs * self.setup.hardware.cell.scheduler_us / 1e6
        return {
            "requests": figures.submitted,
            "finished": figures.finished,
            "failed": dict(sorted(figures.failed.items())),
            "input_tokens": figures.input_tokens,
            "output_tokens": figures.output_tokens,
            "hit_tokens": hits,
            "hit_ratio": sum(hits.values()) / max(1, figures.input_tokens),
            "ttft_ms": figures.ttft_ms.summary(),
            "tpot_ms": figures.tpot_ms.summary(),
            "latency_ms": figures.latency_ms.summary(),
            "simulated_seconds": self.simulated_s,
            "throughput": {
                "requests_per_s": figures.finished / seconds,
                "input_tokens_per_s": figures.input_tokens / seconds,
                "output_tokens_per_s": figures.output_tokens / seconds,
            },
            "load_seconds": sum(worker.load_s for worker in workers),
            "compute_seconds": busy_s - stall_s,
            "stall_seconds": stall_s,
            "bubble_seconds": sum(worker.bubble_s for worker in workers),
            "bubble_tokens": sum(worker.bubble_tokens for worker in workers),
            "computed_tokens": sum(worker.computed_tokens for worker in workers),
            "loaded_tokens": sum(worker.loaded_tokens for worker in workers),
            "batches": sum(worker.batches for worker in workers),
            "steps": sum(worker.steps for worker in workers),
            "evicted_tokens": {
                tier: counters.get(f"evicted_pages_{tier}", 0) * page_size for tier in ("device", "host")
            },
            "backups": sum(storage.backups for storage in self.cell.storages.values()),
            "backed_up_tokens": sum(storage.backed_up_tokens for storage in self.cell.storages.values()),
            "promotions": sum(worker.promotions for worker in workers),
            "promoted_tokens": sum(worker.promoted_tokens for worker in workers),
            "borrowed_tokens": sum(storage.borrowed_tokens for storage in self.cell.storages.values()),
            "saved_chunks": counters.get("saved_chunks", 0),
            "fetched_tokens": counters.get("fetched_tokens", 0),
            "disk_seconds": sum(storage.disk.busy_ns for storage in self.cell.storages.values()) / NS_PER_S,
            "deferrals": counters.get("requests_deferred", 0),
            "scheduler": {"inputs": self.cell.inputs, "busy_fraction": scheduler_s / seconds},
            "nodes": len(state.tree.nodes) - len(state.tree.roots),
            "counters": counters,
        }


def shape_of(setup: Setup) -> CellShape:
    """Return the cell's shape. Raises ConfigError for a worker without room for a page, or a disk without host KV."""
    device_tokens, host_tokens = setup.device_tokens, setup.host_tokens
    if device_tokens is None:
        device_tokens = device_kv_tokens(setup.hardware, setup.model, setup.tensor_parallel)
    if host_tokens is None:
        host_tokens = host_kv_tokens(setup.hardware, setup.model)
    if device_tokens < setup.page_size:
        if setup.device_tokens is not None:
            raise ConfigError(f"--device-tokens {device_tokens} is less than a page of {setup.page_size} tokens")
        raise ConfigError(
            f"{setup.model.name} leaves no room for a page of KV on {setup.tensor_parallel} x {setup.hardware.name}; "
            "give --device-tokens or a larger --tensor-parallel"
        )
    if setup.disk_tokens and host_tokens < setup.page_size:
        raise ConfigError("a disk needs host memory above it: give --host-tokens")
    return CellShape(
        workers=setup.workers,
        workers_per_node=setup.workers_per_node,
        page_size=setup.page_size,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        disk_tokens=setup.disk_tokens,
        network_gb_s=setup.network_gb_s,
    )
