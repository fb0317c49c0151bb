"""Schedules by name. Each is registered where it is defined, in the core or outside it, as eviction policies are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.queue.schedules.protocol import Schedule

SCHEDULES: dict[str, Schedule] = {}


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Add a schedule under a name; a decorator. It raises ValueError when another has that name."""

    def register(schedule: Schedule) -> Schedule:
        if SCHEDULES.setdefault(name, schedule) is not schedule:
            raise ValueError(f"there is a schedule {name!r} already")
        return schedule

    return register
