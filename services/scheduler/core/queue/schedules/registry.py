"""All schedules by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.schedules.balanced import balanced
from services.scheduler.core.queue.schedules.fcfs import fcfs
from services.scheduler.core.queue.schedules.longest_prefix import longest_prefix

if TYPE_CHECKING:
    from services.scheduler.core.queue.schedules.protocol import Schedule

SCHEDULES: dict[str, Schedule] = {"balanced": balanced, "lpm": longest_prefix, "fcfs": fcfs}
