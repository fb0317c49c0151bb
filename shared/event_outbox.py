"""Events in transit into ``TC_INPUTS``: in order, none lost, none twice, whatever the broker does meanwhile.

One event is in flight at a time, with a message id by which the stream drops repeats. The stream forgets ids
after two minutes, so an event whose fate has been unknown for long is looked for in the stream before it is
sent again. While the broker is away the process goes on working and events wait here, up to a bound; a caller that
would exceed it fails (``put``, for those that cannot wait) or waits (``put_when_room``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Gauge

from shared import logs, subjects
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import InternalError, TransportError, Unavailable
from shared.messages.base import Message

_log = logs.get_logger("event_outbox")

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0

DEDUPLICATION_S = 60.0
"""Seconds for which the stream's own deduplication is trusted: half its window, as our clock starts before the append
does."""


@dataclass(slots=True)
class _Pending:
    number: int
    data: bytes
    first_tried_s: float = -1.0


class EventOutbox:
    """Events of one incarnation for one subject. Used on the event loop; ``run`` sends until it is cancelled."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        incarnation: str,
        *,
        capacity: int,
        waiting: Gauge,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with no events; ``incarnation`` is a part of their message ids.

        ``capacity`` is the number of events that may wait. The gauge ``waiting`` shows how many are not known to be
        stored. ``clock_s`` is monotonic.
        """
        self._bus = bus
        self._subject = subject
        self._incarnation = incarnation
        self._capacity = capacity
        self._clock_s = clock_s
        self._waiting = waiting
        self._pending: deque[_Pending] = deque()
        self._numbers = 0
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._room = asyncio.Event()
        self._turn = asyncio.Lock()  # Callers that wait for room are served in order.
        self._reconnected = asyncio.Event()
        self.stored_seq = 0  # Sequence of the last event known to be stored.
        bus.on_reconnect(self._reconnected.set)

    def __len__(self) -> int:
        """Return the number of events that are not known to be stored."""
        return len(self._pending)

    def put(self, event: Message) -> None:
        """Append an event; never waits. Raises InternalError beyond the bound: a lost event would corrupt the cell."""
        if len(self._pending) >= self._capacity:
            raise InternalError(f"{self._capacity} events wait for the broker; one more would be lost")
        self._numbers += 1
        self._pending.append(_Pending(self._numbers, encode(event)))
        self._waiting.set(len(self._pending))
        self._empty.clear()
        self._changed.set()

    async def put_when_room(self, event: Message) -> None:
        """Append an event behind all earlier ones; wait while the outbox is full."""
        async with self._turn:
            while len(self._pending) >= self._capacity:
                self._room.clear()
                await self._room.wait()
            self.put(event)

    async def run(self) -> None:
        """Send in order until cancelled. Raises PayloadTooLarge: such an event could never be stored."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            if not self._pending:
                self._changed.clear()
                self._empty.set()
                await self._changed.wait()
            self._reconnected.clear()
            try:
                self.stored_seq = await self._send(self._pending[0])
            except (Unavailable, TransportError) as error:
                _log.warning("event_delayed", subject=self._subject, waiting=len(self._pending), reason=error.message)
                await self._pause(backoff.next_s())
                continue
            backoff.reset()
            self._pending.popleft()
            self._waiting.set(len(self._pending))
            self._room.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all events are stored; return False if that takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _pause(self, delay_s: float) -> None:
        """Wait before another try, but no longer than for a reconnection: the try may succeed then."""
        try:
            async with asyncio.timeout(delay_s):
                await self._reconnected.wait()
        except TimeoutError:
            pass  # Try anyway: the stream may have been created meanwhile.

    async def _send(self, event: _Pending) -> int:
        now = self._clock_s()
        if event.first_tried_s < 0:
            event.first_tried_s = now
        elif now - event.first_tried_s > DEDUPLICATION_S:
            stored = await self._find(event.data)
            if stored:
                return stored
        return await self._bus.append(self._subject, event.data, message_id=f"{self._incarnation}-{event.number}")

    async def _find(self, data: bytes) -> int:
        """Return the sequence under which an earlier try was stored, 0 if it was not.

        Behind the last event known to be stored there can only be copies of this one.
        """
        messages = self._bus.follow(
            subjects.INPUTS_STREAM, from_seq=self.stored_seq + 1, subject=self._subject, live=False
        )
        async for message in messages:
            if message.data == data:
                return message.seq
        return 0
