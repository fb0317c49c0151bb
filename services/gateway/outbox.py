"""Messages to the scheduler that must arrive, and whose sender does not wait: cancellations and resumptions.

They are stored in the inputs stream in the background, and retried while the broker is away (a message id makes that
harmless). The queue is bounded: beyond it the oldest are dropped, since a gateway that lost its broker for so long is
declared lost and its requests are cancelled anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from shared import logs
from shared.backoff import Backoff
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.errors import ThermoclineError, TransportError, Unavailable
from shared.messages.requests import CancelRequest, ResumeRequest

MAX_WAITING = 65_536
PARALLEL_APPENDS = 64
MOST_REFUSALS = 30
"""Tries of a message that the broker refuses in words that are not known to pass: half a minute of them."""
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 1.0

_log = logs.get_logger("gateway.outbox")


@dataclass(slots=True)
class _Letter:
    message_id: str
    data: bytes
    refusals: int = 0


class Outbox:
    """A queue of messages to one subject. ``post`` never waits; ``run`` sends until cancelled."""

    def __init__(self, bus: Bus, subject: str) -> None:
        """Begin with an empty queue; ``subject`` must be one that the inputs stream captures."""
        self.dropped = 0
        self._bus = bus
        self._subject = subject
        self._waiting: deque[_Letter] = deque()
        self._sending = 0
        self._event = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of messages that are not known to be stored."""
        return len(self._waiting) + self._sending

    def post(self, message: CancelRequest | ResumeRequest) -> None:
        """Queue a message; the oldest is dropped when MAX_WAITING are queued."""
        if isinstance(message, ResumeRequest):
            message_id = f"{message.request_id}.resume.{message.attempt}"
        else:
            message_id = f"{message.request_id}.cancel"
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(_Letter(message_id, encode(message)))
        self._event.set()

    async def run(self) -> None:
        """Send queued messages for ever, with a growing pause after failures."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            await self._event.wait()
            if not self._waiting:
                self._event.clear()
                continue
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), PARALLEL_APPENDS))]
            self._sending = len(batch)
            unsent = [letter for letter in await asyncio.gather(*map(self._send, batch)) if letter is not None]
            self._sending = 0
            if unsent:
                self._waiting.extendleft(reversed(unsent))
                await asyncio.sleep(backoff.next_s())
            else:
                backoff.reset()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every message is stored; return False when ``timeout_s`` passed first."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while len(self):
            if asyncio.get_running_loop().time() >= deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _send(self, letter: _Letter) -> _Letter | None:
        """Store one message; return it when it must be retried, else None."""
        try:
            await self._bus.append(self._subject, letter.data, message_id=letter.message_id)
        except Unavailable:
            return letter
        except ThermoclineError as error:
            letter.refusals += 1
            if isinstance(error, TransportError) and letter.refusals < MOST_REFUSALS:
                return letter
            _log.error("input_refused", message_id=letter.message_id, code=error.code, reason=error.message)
        return None
