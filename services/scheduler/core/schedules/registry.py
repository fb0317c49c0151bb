"""All schedules by name."""

from __future__ import annotations

from services.scheduler.core.schedules.balanced import balanced
from services.scheduler.core.schedules.fcfs import fcfs
from services.scheduler.core.schedules.longest_prefix import longest_prefix
from services.scheduler.core.schedules.protocol import Schedule

SCHEDULES: dict[str, Schedule] = {"balanced": balanced, "lpm": longest_prefix, "fcfs": fcfs}
