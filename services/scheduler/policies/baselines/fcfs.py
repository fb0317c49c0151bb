"""First come, first served: the ready order as it is. A baseline."""

from __future__ import annotations

from services.scheduler.core.queue.schedules import Schedule, register_schedule


@register_schedule
class FirstComeFirstServed(Schedule):
    """First come, first served: every candidate is admitted in the ready order."""

    name = "fcfs"
