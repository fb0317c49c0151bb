"""Temporary registration of a class under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.scheduler.core.cache.eviction import POLICIES, Policy
from services.scheduler.core.queue.schedules import SCHEDULES, Schedule
from services.scheduler.core.tiers.host_admission import ADMISSIONS, Admission

Decides = Policy | Schedule | Admission
"""Kinds of classes that other packages can provide."""


@contextmanager
def registered(kind: type[Decides]) -> Iterator[None]:
    """Register a class under its name for the block, then restore the earlier entry.

    Raises ValueError for the name of another class, unless this one is derived from it.
    """
    if issubclass(kind, Policy):
        registry: dict[str, Any] = POLICIES
        entry: Any = kind
    else:
        registry = SCHEDULES if issubclass(kind, Schedule) else ADMISSIONS
        entry = kind()
    before = registry.get(kind.name)
    known = before if before is None or isinstance(before, type) else type(before)
    if known is not None and not issubclass(kind, known):
        raise ValueError(f"{known.__qualname__} and {kind.__qualname__} are both {kind.name!r}")
    registry[kind.name] = entry
    try:
        yield
    finally:
        if before is None:
            del registry[kind.name]
        else:
            registry[kind.name] = before
