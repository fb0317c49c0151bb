"""What a process was asked for and does not have: kept within bounds, and said in one line.

A process lists its own with every heartbeat, made anew each time from what it knows at that moment. So an entry appears
when something fails and is gone when it works again, and no process remembers another's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

import msgspec

from shared.messages.status import Degradation

TOLD_MOST = 32
"""Degradations of one process that a heartbeat tells of."""

REASON_CHARS = 400


def bounded(degraded: Iterable[Degradation]) -> tuple[Degradation, ...]:
    """At most ``TOLD_MOST`` of them, each with a reason of at most ``REASON_CHARS`` characters on one line."""
    return tuple(msgspec.structs.replace(each, reason=_short(each.reason)) for each in islice(degraded, TOLD_MOST))


class Shortfall(Protocol):
    """A degradation in whichever form it is told."""

    @property
    def component(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def setting(self) -> str: ...


def line(degraded: Shortfall) -> str:
    """One line for people: process, what it lacks, why, and the setting that asked for it."""
    setting = f" ({degraded.setting})" if degraded.setting else ""
    reason = f": {degraded.reason}" if degraded.reason else ""
    return f"{degraded.component}, {degraded.what}{reason}{setting}"


def _short(reason: str) -> str:
    flat = " ".join(reason.split())
    return flat if len(flat) <= REASON_CHARS else flat[: REASON_CHARS - 1] + "…"
