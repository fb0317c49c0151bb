"""The scheduler's composition root: the only place that knows which bus and clocks it runs with."""

from __future__ import annotations

from services.scheduler.cell_metrics import CellCollector
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.eviction import POLICIES
from services.scheduler.core.hotness.expression import parse
from services.scheduler.core.state_form import parse_form
from services.scheduler.shell import Shell
from shared import metrics
from shared.bus.nats_bus import connect
from shared.errors import ConfigError
from shared.ids import is_valid_name, new_id
from shared.lifecycle import Lifecycle


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
    if not config.nats:
        faults.append("--nats names no server")
    if faults:
        raise ConfigError("; ".join(faults))


async def run(config: SchedulerConfig, life: Lifecycle) -> None:
    """Connect, make sure that the streams exist, and run until stopped."""
    check(config)
    bus = await connect(config.nats, config.id)
    collector = CellCollector()
    metrics.REGISTRY.register(collector)
    try:
        await bus.ensure_streams(config.stream_limits())
        await Shell(bus, config, new_id("scheduler"), collector=collector).run(life)
    finally:
        metrics.REGISTRY.unregister(collector)
        await bus.close()
