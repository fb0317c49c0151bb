"""The errors that a client may get during given faults. Pure.

Faults of a worker, a storage, a disk or data excuse nothing: no client may notice them. Only faults on the path from
the client to the input stream do, and only an error that tells the client to try again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from thermocline.chaos.plan import Fault, group_of

SLACK_S = 5.0
"""Seconds after recovery during which an error is still excused: it may have been in flight."""

TRANSPORT = "transport"
SILENCE = "silence"
"""Codes of errors that the client itself detects; no fault excuses silence."""


@dataclass(frozen=True, slots=True)
class ClientError:
    """An error at a client. ``code`` is the API's, TRANSPORT or SILENCE; ``status`` is 0 inside a stream."""

    code: str
    status: int
    retry_after_s: int | None = None
    message: str = ""

    def __str__(self) -> str:
        """Return status, code and message on one line; a status of 0 is shown as ``in stream``."""
        return f"{self.status or 'in stream'} {self.code}: {self.message}"


@dataclass(slots=True)
class Window:
    """The time (seconds of the run) during which a fault could be felt: until its target serves again."""

    fault: Fault
    start_s: float
    end_s: float = math.inf


@dataclass(slots=True)
class Windows:
    """All windows of a run, in order of their start."""

    all: list[Window] = field(default_factory=list)

    def open(self, fault: Fault, now_s: float) -> Window:
        """Add and return a window that starts now; the caller sets ``end_s`` at recovery."""
        window = Window(fault, now_s)
        self.all.append(window)
        return window

    def felt(self, since_s: float, until_s: float) -> list[Fault]:
        """Return the faults that could be felt at some moment from ``since_s`` to ``until_s``, SLACK_S included."""
        return [w.fault for w in self.all if w.start_s <= until_s and since_s <= w.end_s + SLACK_S]


def excuse(error: ClientError, felt: Iterable[Fault], *, has_deadline: bool, workers: int) -> str:
    """Return why a client may get ``error`` during the faults ``felt``; "" if it may not."""
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
