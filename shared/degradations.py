"""Degradations: requested features that a process does not have, in bounded lists and one line each.

A process lists its own with every heartbeat, made each time from its present state. So an entry appears when something
fails and is gone when it works again, and no process remembers another's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

import msgspec

from shared.messages.status import Degradation

TOLD_MOST = 32
"""Degradations of one process at most in a heartbeat."""

REASON_CHARS = 400


def bounded(degraded: Iterable[Degradation]) -> tuple[Degradation, ...]:
    """Return at most ``TOLD_MOST`` of them, each with a one-line reason of at most ``REASON_CHARS`` characters."""
    return tuple(msgspec.structs.replace(each, reason=_short(each.reason)) for each in islice(degraded, TOLD_MOST))


class Shortfall(Protocol):
    """A degradation, whichever message carries it."""

    @property
    def component(self) -> str:
        """Name of the process that lacks something."""

    @property
    def what(self) -> str:
        """The missing feature, in words."""

    @property
    def reason(self) -> str:
        """Why it is missing, in words; "" where that says nothing more."""

    @property
    def setting(self) -> str:
        """Flag that asked for it, such as ``--disk-dir``; "" for none."""


def line(degraded: Shortfall) -> str:
    """Return one line for people: process, missing feature, reason, and the setting that asked for it."""
    setting = f" ({degraded.setting})" if degraded.setting else ""
    reason = f": {degraded.reason}" if degraded.reason else ""
    return f"{degraded.component}, {degraded.what}{reason}{setting}"


def _short(reason: str) -> str:
    flat = " ".join(reason.split())
    return flat if len(flat) <= REASON_CHARS else flat[: REASON_CHARS - 1] + "…"
