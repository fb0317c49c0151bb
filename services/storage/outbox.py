"""Events on their way to the scheduler: kept in order while the broker is away, each appended once.

Every event gets its message id when it is posted, so an append that was tried again after a lost
acknowledgement is stored once. The outbox is bounded: whoever posts into a full one waits, which in the end
stops the copying, and not the process.
"""

from __future__ import annotations

import asyncio

from services.storage import measures
from shared import logs
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import PayloadTooLarge, ThermoclineError
from shared.messages.base import Message

RETRY_S = 1.0

_log = logs.get_logger("storage")


class Outbox:
    """Events for one subject. ``run`` appends them until cancelled."""

    def __init__(self, bus: Bus, subject: str, incarnation: str, *, capacity: int = 4096) -> None:
        self._bus = bus
        self._subject = subject
        self._incarnation = incarnation
        self._posted = 0
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(maxsize=capacity)
        self._reconnected = asyncio.Event()
        bus.on_reconnect(self._reconnected.set)

    async def post(self, event: Message) -> None:
        """Queue an event behind all earlier ones; waits while the outbox is full."""
        self._posted += 1
        await self._queue.put((f"{self._incarnation}.{self._posted}", encode(event)))
        measures.OUTBOX.set(self._queue.qsize())

    async def run(self) -> None:
        while True:
            message_id, data = await self._queue.get()
            await self._append(message_id, data)
            self._queue.task_done()
            measures.OUTBOX.set(self._queue.qsize())

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything posted is stored; False when that took longer than ``timeout_s``."""
        try:
            await asyncio.wait_for(self._queue.join(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _append(self, message_id: str, data: bytes) -> None:
        while True:
            self._reconnected.clear()
            try:
                await self._bus.append(self._subject, data, message_id=message_id)
            except PayloadTooLarge:
                # It can never be sent; events have bounded texts, so this is a broker with absurd limits.
                _log.exception("event_dropped", message_id=message_id, nbytes=len(data))
                return
            except ThermoclineError as error:
                _log.warning("event_not_appended", message_id=message_id, reason=error.message)
            else:
                return
            try:
                await asyncio.wait_for(self._reconnected.wait(), RETRY_S)
            except TimeoutError:
                pass  # Try anyway: the stream may have been made meanwhile.
