"""Which errors a client may get, given the faults that were felt meanwhile. Pure.

A worker, a storage, a disk or bad data excuse nothing: no client may notice them. Only what cuts the path between
the client and the input stream does, and only with an error that tells a client to try again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from thermocline.chaos.plan import Fault, group_of

SLACK_S = 5.0
"""An error may come this long after the cell was well again: it may have been on its way."""

TRANSPORT = "transport"
SILENCE = "silence"
"""Codes of what a client notices without being told; no fault excuses silence."""


@dataclass(frozen=True, slots=True)
class ClientError:
    """``code`` is the API's, or ``transport`` where the connection failed. ``status`` is 0 inside a stream."""

    code: str
    status: int
    retry_after_s: int | None = None
    message: str = ""

    def __str__(self) -> str:
        return f"{self.status or 'in stream'} {self.code}: {self.message}"


@dataclass(slots=True)
class Window:
    """From when to when (seconds of the run) a fault could be felt; it ends when its target serves again."""

    fault: Fault
    start_s: float
    end_s: float = math.inf


@dataclass(slots=True)
class Windows:
    """All windows of a run, in order of their start."""

    all: list[Window] = field(default_factory=list)

    def open(self, fault: Fault, now_s: float) -> Window:
        window = Window(fault, now_s)
        self.all.append(window)
        return window

    def felt(self, since_s: float, until_s: float) -> list[Fault]:
        """Return the faults that could be felt at some moment between."""
        return [w.fault for w in self.all if w.start_s <= until_s and since_s <= w.end_s + SLACK_S]


def excuse(error: ClientError, felt: Iterable[Fault], *, has_deadline: bool, workers: int) -> str:
    """Why a client may get ``error`` while ``felt`` were felt; "" if it may not."""
    faults = list(felt)
    groups = {group_of(fault.target) for fault in faults}
    if error.code == "deadline_exceeded":
        return "its deadline" if has_deadline else ""
    if error.status == 429:
        return "full queue" if error.retry_after_s is not None else ""
    if error.code == TRANSPORT:
        ended = [f for f in faults if f.target == "gateway" and f.kind in ("kill", "restart")]
        return "its gateway died" if ended else ""
    if error.status == 503 and error.retry_after_s is None:
        return ""
    if error.status == 503 or error.code in ("service_unavailable", "unavailable"):
        if groups & {"nats", "scheduler", "gateway"}:
            return "no way to the input stream"
        out = {fault.target for fault in faults if group_of(fault.target) == "worker"}
        return "no worker was there" if len(out) >= workers else ""
    if error.status in (0, 499) and error.code == "cancelled":
        return "its gateway was taken for dead" if "gateway" in groups else ""
    return ""
