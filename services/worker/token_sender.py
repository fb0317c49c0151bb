"""Messages of tokens to gateways: one core message per gateway and step, at most once, never waited for.

A message leaves as soon as it is put, without waking a task. Only messages that the connection does not take at once
are queued. A message lost here (the broker is away, or the gateway is slow) is asked for by the gateway, which sees the
gap in ``TokenItem.index``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from services.worker import metrics
from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import PayloadTooLarge, Unavailable
from shared.messages.tokens import TokenBatch, TokenItem


class TokenSender:
    """Sends messages of tokens, or queues them. Owned by the event loop."""

    def __init__(self, bus: Bus, *, on_too_large: Callable[[TokenItem], None], capacity: int = 4096) -> None:
        """Send over ``bus``, which is not closed here, and queue at most ``capacity`` messages.

        ``on_too_large`` is called, on the event loop, with an item that no message can carry; an error is sent in its
        place.
        """
        self._bus = bus
        self._on_too_large = on_too_large
        self._batches: deque[tuple[str, TokenBatch]] = deque()
        self._capacity = capacity
        self._is_sending = False
        self._changed = asyncio.Event()

    def put(self, gateway_id: str, batch: TokenBatch) -> None:
        """Send one message now, or queue it behind others; beyond the bound the oldest is dropped."""
        if not self._batches and not self._is_sending and self._send_now(gateway_id, batch):
            return
        if len(self._batches) >= self._capacity:
            self._batches.popleft()
            metrics.TOKEN_MESSAGES_DROPPED.inc()
        self._batches.append((gateway_id, batch))
        self._changed.set()

    async def run(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            if not self._batches:
                self._changed.clear()
                await self._changed.wait()
            await self._send_next()

    async def flush(self) -> None:
        """Send the queued messages; for the end, after ``run`` was cancelled."""
        while self._batches:
            await self._send_next()

    def _send_now(self, gateway_id: str, batch: TokenBatch) -> bool:
        """Send a message if it may leave as it is and at once; return whether it did."""
        try:
            is_sent = self._bus.publish_now(subjects.tokens(gateway_id), encode(batch))
        except (Unavailable, PayloadTooLarge):
            return False
        if is_sent:
            metrics.TOKEN_MESSAGES.inc()
        return is_sent

    async def _send_next(self) -> None:
        self._is_sending = True
        try:
            await self._send(*self._batches.popleft())
        finally:
            self._is_sending = False

    async def _send(self, gateway_id: str, batch: TokenBatch) -> None:
        try:
            await self._bus.publish(subjects.tokens(gateway_id), encode(batch))
            metrics.TOKEN_MESSAGES.inc()
        except Unavailable:
            metrics.TOKEN_MESSAGES_DROPPED.inc()
        except PayloadTooLarge as error:
            if len(batch.items) > 1:
                half = len(batch.items) // 2
                for items in (batch.items[:half], batch.items[half:]):
                    await self._send(gateway_id, msgspec.structs.replace(batch, items=items))
                return
            item = batch.items[0]
            if item.finish == "error":
                raise  # An error that does not fit cannot be shortened any further.
            self._on_too_large(item)
            apology = TokenItem(
                request_id=item.request_id,
                attempt=item.attempt,
                index=item.index,
                tokens=(),
                finish="error",
                error=f"the answer does not fit in one message: {error.message}",
            )
            await self._send(gateway_id, msgspec.structs.replace(batch, items=(apology,)))
