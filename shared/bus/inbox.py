"""The bounded inbox of one subscription: items in order of arrival, handled by one or a few calls at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared import logs
from shared.bus import measures

T = TypeVar("T")

_log = logs.get_logger("bus")

# A handler that never suspends would otherwise keep the loop from everything else while its queue is full.
_YIELD_EVERY = 64


async def _nothing() -> None:
    return None


def _ignore() -> None:
    return None


class Inbox(Generic[T]):
    """A ``shared.bus.protocol.Subscription`` over any source that calls :meth:`put`.

    An exception of the handler is logged and the next item is handled; it never ends the subscription.
    """

    def __init__(
        self,
        subject: str,
        handler: Callable[[T], Awaitable[None]],
        *,
        limit: int,
        limit_bytes: int = 0,
        at_once: int = 1,
        on_close: Callable[[], Awaitable[None]] = _nothing,
        on_caught_up: Callable[[], None] = _ignore,
    ) -> None:
        """``at_once`` calls of ``handler`` run at a time; they begin in the order of their items.

        ``limit_bytes`` bounds the queued bytes; 0 is no bound. ``on_caught_up`` is called when the queue is empty again
        after a drop: only then does a search for lost items find all of them.
        """
        self.subject = subject
        self.dropped = 0
        self._limit_bytes = limit_bytes
        self._waiting_bytes = 0
        self._on_caught_up = on_caught_up
        self._is_behind = False
        self._handler = handler
        self._on_close = on_close
        self._queue: asyncio.Queue[tuple[T, int]] = asyncio.Queue(maxsize=limit)
        self._closed = False
        self._running: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._run(), name=f"inbox {subject}") for _ in range(at_once)]

    def put(self, item: T, nbytes: int = 0) -> None:
        """Queue an item; beyond a limit it is dropped and counted. A single item always fits, however large it is."""
        if self._closed:
            return
        if self._limit_bytes and self._waiting_bytes and self._waiting_bytes + nbytes > self._limit_bytes:
            self.drop()
            return
        try:
            self._queue.put_nowait((item, nbytes))
            self._waiting_bytes += nbytes
        except asyncio.QueueFull:
            self.drop()

    def drop(self) -> None:
        """Count an item that could not be queued."""
        self.dropped += 1
        self._is_behind = True
        measures.DROPPED.inc()
        # Powers of two keep a flood from flooding the log as well.
        if self.dropped & (self.dropped - 1) == 0:
            _log.warning("messages_dropped", subject=self.subject, dropped=self.dropped)

    async def drain(self) -> None:
        """Return when everything queued so far has been handled."""
        if asyncio.current_task() not in self._tasks:
            await self._queue.join()

    async def close(self) -> None:
        """End the subscription; running handlers finish, queued items are dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._on_close()
        for task in self._tasks:
            if task not in self._running:
                task.cancel()
        if asyncio.current_task() not in self._tasks:  # A handler that calls this ends its loop by itself.
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """End the subscription at once and cancel running handlers; for a shutdown that has timed out."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        handled = 0
        while not self._closed:
            item, nbytes = await self._queue.get()
            self._waiting_bytes -= nbytes
            self._running.add(task)
            try:
                await self._handler(item)
            except asyncio.CancelledError:
                if task.cancelling():
                    raise
                # The handler awaited something that was cancelled elsewhere.
                _log.warning("handler_cancelled", subject=self.subject)
            except Exception:
                _log.exception("handler_failed", subject=self.subject)
            finally:
                self._running.discard(task)
                self._queue.task_done()
            if self._is_behind and self._queue.empty():
                self._is_behind = False
                _log.info("messages_caught_up", subject=self.subject, dropped=self.dropped)
                self._on_caught_up()
            handled += 1
            if handled % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
