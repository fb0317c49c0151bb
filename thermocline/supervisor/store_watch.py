"""Watches whether the embedded broker can store messages, and restarts it when only a restart helps.

A stream of nats-server that once could not be written, as on a full disk, takes no message until the server starts
again, even when there is room. The server says so when it is asked for its health; a message to another stream would
not show it. Streams are on the disk, and messages that were not stored were not confirmed, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thermocline.supervisor.folders import LEAST_FREE_BYTES

EVERY_S = 2.0

FAULTY_S = 5.0
"""A fault of this length is no passing one."""

APART_S = 30.0
"""Shortest time between two restarts; RestartPolicy allows as many as that."""

Step = Literal["none", "full", "restart", "recovered"]


@dataclass(slots=True)
class StoreWatch:
    """Decides from the broker's health. Pure: times are arguments, in seconds of one clock."""

    faulty_since: float | None = None
    restarted: float | None = None
    is_told: bool = False

    def step(self, fault: str | None, has_room: bool, now: float) -> Step:
        """Return what to do. ``fault`` is what the broker says of itself, "" for health, None for no answer."""
        if fault is None:
            return "none"  # It starts, or is busy.
        if not fault:
            was_told, self.is_told, self.faulty_since = self.is_told, False, None
            return "recovered" if was_told else "none"
        if self.faulty_since is None:
            self.faulty_since = now
        if not has_room:
            was_told, self.is_told = self.is_told, True
            return "none" if was_told else "full"
        is_soon = self.restarted is not None and now - self.restarted < APART_S
        if is_soon or now - self.faulty_since < FAULTY_S:
            return "none"
        self.restarted, self.is_told = now, True
        return "restart"


async def watch_store(
    health: Callable[[], Awaitable[str | None]],
    folder: Path,
    restart: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
) -> None:
    """Watch the broker, whose streams are in ``folder``, until cancelled; ``say`` gets lines for the operator."""
    watch = StoreWatch()
    while True:
        fault = await health()
        room = bool(fault) and await asyncio.to_thread(has_room, folder)
        match watch.step(fault, room, time.monotonic()):
            case "full":
                say(f"no room in {folder}: the broker stores nothing, and requests wait until there is room ({fault})")
            case "restart":
                say(f"the broker stores nothing though there is room in {folder}; it is restarted ({fault})")
                await restart()
            case "recovered":
                say("the broker stores messages again")
        await asyncio.sleep(EVERY_S)


def has_room(folder: Path) -> bool:
    """Return whether LEAST_FREE_BYTES can be written to ``folder`` now, by disk and quota."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, LEAST_FREE_BYTES)
    except OSError:
        return False
    return True
