"""The results of a run, from which the report is made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from thermocline.chaos.load import Tally
from thermocline.chaos.log_events import LogEvents
from thermocline.chaos.plan import Fault
from thermocline.chaos.settings import ChaosSettings
from thermocline.chaos.verdicts import Windows


@dataclass(slots=True)
class Outcome:
    """The results of a run. ``recovery_s`` holds the seconds from fault to serving again, by kind and group.

    ``memory`` has samples of (seconds, bytes) by name and pid. ``origin_s`` is when the load began
    (``time.monotonic``); windows count their seconds from it.
    """

    settings: ChaosSettings
    tally: Tally
    windows: Windows
    faults: list[Fault] = field(default_factory=list)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    own_ends: Counter[str] = field(default_factory=Counter)
    logged: LogEvents = field(default_factory=LogEvents)
    counters: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    requests_known: int = 0
    origin_s: float = 0.0
    seconds: float = 0.0
    rests: int = 0
