"""First come, first served: the ready order as it is. A baseline."""

from __future__ import annotations

from services.scheduler.core.queue.schedules import Schedule, register_schedule


@register_schedule
class FirstComeFirstServed(Schedule):
    """Every candidate in turn."""

    name = "fcfs"
