"""Which waiting requests a batch takes, and in which order: one schedule a file, behind one protocol, found by name."""

from services.scheduler.core.queue.schedules.balanced import balanced
from services.scheduler.core.queue.schedules.protocol import Candidates, Schedule
from services.scheduler.core.queue.schedules.registry import SCHEDULES, register_schedule

__all__ = ["SCHEDULES", "Candidates", "Schedule", "balanced", "register_schedule"]
