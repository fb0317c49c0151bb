"""Which waiting requests a batch takes, and in which order: one schedule a file, behind one protocol."""

from services.scheduler.core.queue.schedules.registry import SCHEDULES

__all__ = ["SCHEDULES"]
