"""The last heartbeat of a process, repeated from a thread of its own while the process has no time to.

An event loop may be busy for seconds, with one large answer or one long step, and the cell must not take its process
for dead: losing all of its answers is worse than a pause. So heartbeats go out over a connection that belongs to a
thread with an event loop of its own. A process without a new heartbeat for :data:`STUCK_S` is as good as dead, and its
heartbeats are not repeated any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from shared import logs
from shared.errors import ConfigError, Unavailable

REPEAT_S = 1.5
"""Seconds without a new heartbeat, due every second, after which the last one is repeated."""

STUCK_S = 30.0
RETRY_S = 5.0
END_S = 2.0

_log = logs.get_logger("beats")


class Line(Protocol):
    """A connection of the thread's own for heartbeats."""

    @property
    def is_connected(self) -> bool:
        """Whether a heartbeat would go out now."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish one heartbeat. Raises Unavailable."""

    async def close(self) -> None:
        """Close the connection."""


class Beats:
    """The heartbeats of one process. Made and used on its event loop; :meth:`close` once."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Line]],
        *,
        repeat_s: float = REPEAT_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``connect`` is called in the thread, and again after a failure."""
        self._connect = connect
        self._repeat_s = repeat_s
        self._clock_s = clock_s
        self._last: tuple[str, bytes, float] = ("", b"", 0.0)
        self._line: Line | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def say(self, subject: str, data: bytes) -> bool:
        """Send this heartbeat now, and again while there is no newer one; return False while not connected."""
        self._last = (subject, data, self._clock_s())
        self._wake()
        return self._line is not None and self._line.is_connected

    def close(self) -> None:
        """Send no more heartbeats. Waits for the thread, at most END_S."""
        self._is_closing = True
        self._wake()
        self._thread.join(END_S)

    def due(self) -> tuple[str, bytes] | None:
        """Return (subject, heartbeat) to repeat now; None where there is none or it is older than STUCK_S."""
        subject, data, said_s = self._last
        return (subject, data) if subject and self._clock_s() - said_s < STUCK_S else None

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # The thread may have ended by itself.
            self._loop.call_soon_threadsafe(self._news.set)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._say_on())

    async def _say_on(self) -> None:
        while not self._is_closing:
            try:
                line = await self._connect()
            except (Unavailable, ConfigError) as error:
                _log.info("heartbeats_share_a_connection", reason=error.message)
                await self._wait(RETRY_S)
                continue
            self._line = line
            try:
                await self._say_over(line)
            finally:
                self._line = None
                await line.close()

    async def _say_over(self, line: Line) -> None:
        while not self._is_closing:
            await self._wait(self._repeat_s)
            due = self.due()
            if due is not None and not self._is_closing:
                with contextlib.suppress(Unavailable):  # It connects again by itself.
                    await line.publish(*due)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a new heartbeat, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()
