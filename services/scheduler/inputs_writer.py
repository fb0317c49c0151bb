"""Appending the scheduler's own inputs to the stream, however long the broker is away."""

from __future__ import annotations

import asyncio

from shared import logs, subjects
from shared.bus.protocol import Bus
from shared.codec import Input, encode
from shared.errors import TransportError, Unavailable

RETRY_S = 0.2

_log = logs.get_logger("inputs")


async def append_until_stored(bus: Bus, message: Input, message_id: str) -> int:
    """Append to ``TC_INPUTS`` and return the sequence; repeat with the same id until it is acknowledged."""
    body = encode(message)
    attempt = 0
    while True:
        try:
            return await bus.append(subjects.cell_input(), body, message_id=message_id)
        except (Unavailable, TransportError) as error:
            if attempt % 50 == 0:
                _log.warning("append_delayed", input=type(message).__name__, reason=error.message)
            attempt += 1
            await asyncio.sleep(RETRY_S)
