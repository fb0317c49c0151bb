"""The scheduler's composition root: the only place that knows which bus and clocks it runs with."""

from __future__ import annotations

from services.scheduler.cell_metrics import CellCollector
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.eviction import POLICIES
from services.scheduler.core.hotness.expression import parse
from services.scheduler.core.state_form import parse_form
from services.scheduler.inputs_writer import append_until_stored
from services.scheduler.shell import Shell
from shared import metrics, subjects, tracing
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.errors import ConfigError
from shared.ids import is_valid_name, new_id
from shared.lifecycle import Lifecycle
from shared.messages.cell_events import CellConfigured
from shared.tracing import Tracer


def check(config: SchedulerConfig) -> None:
    """Raises ConfigError with every fault that types alone do not show."""
    faults = []
    if not is_valid_name(config.id):
        faults.append(f"--id {config.id!r} may hold letters, digits, _ and - only")
    if config.policy not in POLICIES:
        faults.append(f"--policy {config.policy!r} is unknown; known are {', '.join(sorted(POLICIES))}")
    for flag, text in (
        ("--eviction-expression", config.eviction_expression),
        ("--hotness-expression", config.hotness_expression),
    ):
        try:
            parse(text)
        except ConfigError as fault:
            faults.append(f"{flag}: {fault.message}")
    try:
        parse_form(config.state_form)
    except ConfigError as fault:
        faults.append(f"--state-form: {fault.message}")
    if faults:
        raise ConfigError("; ".join(faults))


async def run(config: SchedulerConfig, life: Lifecycle) -> None:
    """Connect, make sure that the streams exist, and run until stopped."""
    check(config)
    async with tracing.running(config.traces, "scheduler", config.id) as tracer:
        await _serve(config, life, tracer)


async def _serve(config: SchedulerConfig, life: Lifecycle, tracer: Tracer | None) -> None:
    bus = await connect_with(config, config.id)
    collector = CellCollector()
    metrics.REGISTRY.register(collector)
    try:
        await bus.ensure_streams(config.stream_limits())
        await _configure_new_cell(bus, config)
        await Shell(bus, config, new_id("scheduler"), collector=collector, tracer=tracer).run(life)
    finally:
        metrics.REGISTRY.unregister(collector)
        await bus.close()


async def _configure_new_cell(bus: Bus, config: SchedulerConfig) -> None:
    """Say the settings before anything else is said. Members join as soon as there are streams, before a scheduler is
    active, and some decisions about them stay: whether they have a host pool, and the form of state.

    Of several schedulers that start together one is heard; the active one says its own settings where they differ. A
    storage that waited for the streams may come before it; nothing is decided before a worker has loaded its model.
    """
    if (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq <= 1:
        await append_until_stored(bus, CellConfigured(config=config.cell_config()), "first-configuration")
