"""The scheduler's composition root: the only place that knows which bus and clocks it runs with."""

from __future__ import annotations

from services.scheduler.cell_metrics import CellCollector
from services.scheduler.checks import check
from services.scheduler.config import SchedulerConfig
from services.scheduler.heap import keep_heap
from services.scheduler.outside import load_installed, of_config
from services.scheduler.shell import Shell
from shared import logs, metrics, tracing
from shared.bus.nats_bus import connect_with
from shared.ids import new_id
from shared.lifecycle import Lifecycle
from shared.tracing import Tracer

_log = logs.get_logger("scheduler")


async def run(config: SchedulerConfig, life: Lifecycle) -> None:
    """Check settings, load policies, connect, create missing streams, and run until stopped. Raises ConfigError."""
    metrics.serve(config.metrics_port, config.metrics_host)
    check(config)
    keep_heap()
    for name, fault in load_installed().items():
        _log.warning("outside_policy_not_loaded", name=name, reason=fault)
    used = of_config(config.cell_config())
    if used:
        _log.info("outside_policies", used=used)
    async with tracing.running(config.traces, "scheduler", config.id) as tracer:
        await _serve(config, life, tracer)


async def _serve(config: SchedulerConfig, life: Lifecycle, tracer: Tracer | None) -> None:
    bus = await connect_with(config, config.id)
    collector = CellCollector()
    metrics.REGISTRY.register(collector)
    try:
        await bus.ensure_streams(config.stream_limits())
        await Shell(bus, config, new_id("scheduler"), collector=collector, tracer=tracer).run(life)
    finally:
        metrics.REGISTRY.unregister(collector)
        await bus.close()
