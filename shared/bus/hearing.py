"""A subscription whose hearer is called where messages are read: nothing waits for a task, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared import logs

T = TypeVar("T")

_log = logs.get_logger("bus")


class Hearing(Generic[T]):
    """Implements ``shared.bus.protocol.Subscription`` over any source that calls :meth:`put`.

    An exception of the hearer is logged and the next item is heard; it never ends the subscription.
    """

    dropped = 0  # Never any: there is no queue.

    def __init__(self, subject: str, hearer: Callable[[T], None], on_close: Callable[[], Awaitable[None]]) -> None:
        self._subject = subject
        self._hearer = hearer
        self._on_close = on_close
        self._closed = False

    def put(self, item: T, nbytes: int = 0) -> None:
        """Have an item heard. It is in no buffer afterwards, so ``nbytes`` need no bound."""
        if self._closed:
            return
        try:
            self._hearer(item)
        except Exception:
            _log.exception("hearer_failed", subject=self._subject)

    async def drain(self) -> None:
        """Return when everything that came has been heard: at once."""

    async def close(self) -> None:
        """Hear no more. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._on_close()

    def cancel(self) -> None:
        """Hear no more, without telling the source."""
        self._closed = True
