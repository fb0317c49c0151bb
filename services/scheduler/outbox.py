"""Publishing outputs so that none is lost while the broker is away.

A core publish may die in the connection's buffers. The outbox therefore keeps every output until a round trip
to the server has confirmed it, and sends what is unconfirmed again, in order, after a reconnect. Targets drop
numbers that they have executed, so a repeat is harmless.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.scheduler.targets import target_of
from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import Published, encode
from shared.errors import PayloadTooLarge, Unavailable

MOST_UNCONFIRMED = 2048
"""So many outputs are held at the most before the fold waits for a round trip."""

RETRY_S = 0.1

_log = logs.get_logger("outbox")


class Outbox:
    """Sends in order. Any task may call its methods at any time."""

    def __init__(self, bus: Bus, wall_clock_ns: Callable[[], int]) -> None:
        self.refused = 0
        self._bus = bus
        self._wall_clock_ns = wall_clock_ns
        self._unconfirmed: deque[tuple[str, bytes]] = deque()
        self._sent = 0  # So many of them were given to the current connection.
        self._generation = 0
        self._publishing = asyncio.Lock()
        self._confirming = asyncio.Lock()
        bus.on_disconnect(self._forget_connection)
        bus.on_reconnect(self._forget_connection)

    @property
    def unconfirmed(self) -> int:
        """Outputs that the server may not have."""
        return len(self._unconfirmed)

    async def send(self, outputs: Sequence[Published]) -> None:
        """Publish; returns at once while there is room, even when disconnected."""
        for output in outputs:
            self._unconfirmed.append((target_of(output).subject, encode(output)))
        try:
            await self._publish()
        except Unavailable:
            pass  # Sent again after the reconnect; confirm() sees to it.
        if len(self._unconfirmed) >= MOST_UNCONFIRMED:
            await self.confirm()

    async def confirm(self) -> None:
        """Return when the server has every output given to :meth:`send` so far, however long that takes."""
        async with self._confirming:
            remaining = len(self._unconfirmed)
            while remaining:
                try:
                    await self._publish()
                    generation, sent = self._generation, self._sent
                    await self._bus.flush()
                except Unavailable:
                    await asyncio.sleep(RETRY_S)
                    continue
                if generation == self._generation:
                    for _ in range(sent):
                        self._unconfirmed.popleft()
                    self._sent -= sent
                    remaining = max(0, remaining - sent)

    async def _publish(self) -> None:
        async with self._publishing:
            while self._sent < len(self._unconfirmed):
                generation = self._generation
                subject, body = self._unconfirmed[self._sent]
                try:
                    await self._bus.publish(subject, body, {subjects.SENT_NS_HEADER: str(self._wall_clock_ns())})
                except PayloadTooLarge:
                    # Retrying cannot help. Its target notices the missing number and says so in its own log.
                    self.refused += 1
                    _log.error("output_exceeds_max_payload", subject=subject, nbytes=len(body))
                if generation == self._generation:
                    self._sent += 1

    def _forget_connection(self) -> None:
        self._generation += 1
        self._sent = 0
