"""A subscription whose hearer is called as messages are read: no message waits for a task, and none is dropped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared import logs

T = TypeVar("T")

_log = logs.get_logger("bus")


class Hearing(Generic[T]):
    """A ``shared.bus.protocol.Subscription`` over any source that calls :meth:`put`.

    An exception of the hearer is logged and the next item is heard; it never ends the subscription.
    """

    dropped = 0  # Always: there is no queue.

    def __init__(self, subject: str, hearer: Callable[[T], None], on_close: Callable[[], Awaitable[None]]) -> None:
        """Pass items to ``hearer``, which must be quick; :meth:`close` awaits ``on_close`` once."""
        self._subject = subject
        self._hearer = hearer
        self._on_close = on_close
        self._closed = False

    def put(self, item: T, nbytes: int = 0) -> None:
        """Call the hearer with an item. Nothing is buffered, so ``nbytes`` need no bound."""
        if self._closed:
            return
        try:
            self._hearer(item)
        except Exception:
            _log.exception("hearer_failed", subject=self._subject)

    async def drain(self) -> None:
        """Return at once: all items that came have been heard."""

    async def close(self) -> None:
        """End the subscription and notify the source. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._on_close()

    def cancel(self) -> None:
        """End the subscription without notifying the source."""
        self._closed = True
