"""Waiting for the streams that the scheduler makes; workers may be started before it."""

from __future__ import annotations

import asyncio

from shared import logs, subjects
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.errors import TransportError, Unavailable
from shared.lifecycle import Lifecycle

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0

_log = logs.get_logger("worker")


async def wait_for_streams(bus: Bus, life: Lifecycle) -> bool:
    """Return True when both streams exist; False when stopped before that."""
    backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
    while not life.stopping.is_set():
        try:
            await bus.stream_info(subjects.INPUTS_STREAM)
            await bus.stream_info(subjects.OUTPUTS_STREAM)
            return True
        except (TransportError, Unavailable) as error:
            _log.info("waiting_for_streams", reason=error.message)
            await asyncio.sleep(backoff.next_s())
    return False
