"""Errors in the logs of the cell's processes, and those that no fault can explain. Pure but for reading files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# A lost broker may end a process, which logs it; no fault may cause one of these.
_NEVER = (
    "InvariantViolated",
    "IllegalTransition",
    "CodecError",
    "AssertionError",
    "AttributeError",
    "IndexError",
    "KeyError",
    "TypeError",
    "was never retrieved",
    "was never awaited",
    "Fatal Python error",
)

_MAX_BYTES = 256 * 1024**2


@dataclass(slots=True)
class LogEvents:
    """``errors`` counts events of level error by process and event; ``defects`` are lines that no fault explains."""

    errors: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


def look_through(logs: Iterable[Path]) -> LogEvents:
    """Read the logs of all processes but the broker, at most 256 MiB of each."""
    events = LogEvents()
    for path in sorted(logs):
        if path.name.startswith("nats"):
            continue
        with path.open("rb") as file:
            for line in file.read(_MAX_BYTES).decode("utf-8", errors="replace").splitlines():
                _take(events, path.name.partition(".")[0], line)
    return events


def _take(events: LogEvents, name: str, line: str) -> None:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        # Python's own complaints are plain text.
        if any(word in line for word in _NEVER):
            events.defects.append(f"{name}: {line[:500]}")
        return
    exception = str(event.get("exception", ""))
    if event.get("level") in ("error", "critical"):
        events.errors[f"{name} {event.get('event')}"] += 1
    if exception and any(word in exception for word in _NEVER):
        events.defects.append(f"{name}: {event.get('event')}: {exception[-800:]}")
