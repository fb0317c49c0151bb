"""An answer as server-sent events.

New tokens are written as they arrive, without waking a task, as long as the connection accepts them. Those that arrive
while the client takes a chunk are coalesced into the next one, so a slow client costs fewer and larger chunks, never a
growing queue of them; a client that reads nothing for too long is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway import sse
from services.gateway.pending import Choice, Generation
from services.gateway.ticket import Ticket
from services.gateway.views.answer import AnswerView
from shared import logs
from shared.errors import RequestCancelled, ThermoclineError

ABORT_EXTENSION = "thermocline.abort"
"""Extension of the ASGI scope: drops the connection and its unsent data."""

WRITE_EXTENSION = "thermocline.write"
"""Extension of the ASGI scope: writes a part of the body at once, or returns False if the connection cannot take it."""

_log = logs.get_logger("gateway.stream")


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Limits of a stream, in seconds.

    ``keepalive_s`` is the pause after which a keepalive is sent, ``send_s`` the longest time for one write.
    """

    keepalive_s: float
    send_s: float


class EventStream(Response):
    """A response that sends a generation as it grows. Owns ``ticket`` from its call on."""

    background: BackgroundTask | None = None

    def __init__(
        self,
        generation: Generation,
        view: AnswerView,
        ticket: Ticket,
        times: StreamTimes,
        before_closing: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """``before_closing`` is awaited behind the last token of an answer that has not failed."""
        self.status_code = 200
        self.raw_headers = list(sse.HEADERS)
        self._generation = generation
        self._view = view
        self._framing = view.framing
        self._ticket = ticket
        self._times = times
        self._before_closing = before_closing
        self._is_open = False
        self._write: Callable[[bytes], bool] | None = None
        self._unsent = b""  # Events that could not be written at once.
        self._fault: Exception | None = None  # Why events could not be made.
        self._clock = asyncio.get_running_loop().time
        self._written_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer to its end, or abort the connection of a client that reads too slowly; close the ticket."""
        extensions = scope.get("extensions", {})
        abort: Callable[[], None] | None = extensions.get(ABORT_EXTENSION)
        self._write = extensions.get(WRITE_EXTENSION)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
        except TimeoutError:
            _log.info("slow_client_dropped", request_id=self._generation.choices[0].request_id)
            self._generation.abandon(RequestCancelled("the client reads too slowly", code="client_too_slow"))
            if abort is not None:
                abort()
        finally:
            self._ticket.close()

    async def _send_events(self, send: Send) -> None:
        generation = self._generation
        data = self._events(self._opening()) if self._framing.opens_at_once else b""
        news: list[Choice] = generation.choices
        while True:
            data += self._events(self._chunks(news))
            failure = generation.first_failure()
            if failure is not None or generation.is_over:
                if failure is None and self._before_closing is not None:
                    if data:  # The answer is sent before the closing work.
                        await self._send(send, data)
                    data = b""
                    await self._before_closing()
                await self._send(send, data + self._ending(failure), more=False)
                return
            if data:
                await self._send(send, data)
            changed = await self._wait()
            data, self._unsent = self._unsent, b""
            if changed is None:
                data = self._framing.keepalive
                changed = generation.choices  # Tokens may have come as the wait ended.
            news = changed

    async def _wait(self) -> list[Choice] | None:
        """Write new tokens as they arrive, until some cannot be written at once or the answer ends.

        Returns the choices of those tokens. None means that nothing was written for so long that a keepalive is due.
        """
        generation = self._generation
        self._written_s = self._clock()
        if self._write is not None:
            generation.take_news = self._take_news
        try:
            while True:
                wait_s = self._written_s + self._times.keepalive_s - self._clock()
                news = await generation.changed(max(0.0, wait_s))
                if self._fault is not None:
                    raise self._fault
                if news is not None or self._clock() >= self._written_s + self._times.keepalive_s:
                    return news
        finally:
            generation.take_news = None

    def _take_news(self, news: list[Choice]) -> bool:
        """Write the new tokens of these choices; return False where the connection does not accept them now."""
        try:
            data = self._events(self._chunks(news))
        except Exception as error:
            self._fault = error  # This call is not awaited.
            return False
        self._written_s = self._clock()
        if data and (self._write is None or not self._write(data)):
            self._unsent = data
            return False
        return True

    def _opening(self) -> Iterable[bytes]:
        """Return the chunks before any token, once."""
        if not self._is_open:
            self._is_open = True
            yield from self._view.opening()

    def _chunks(self, choices: Iterable[Choice]) -> Iterable[bytes]:
        for choice in choices:
            delta = choice.assembly.take()
            if not delta.is_empty and choice.failure is None:
                yield from self._opening()
                chunk = self._view.chunk(choice, delta)
                if chunk is not None:
                    yield chunk

    def _ending(self, failure: ThermoclineError | None) -> bytes:
        if failure is not None:
            return self._view.failed(failure) + self._framing.end
        return self._events(self._view.closing()) + self._framing.end

    def _events(self, chunks: Iterable[bytes]) -> bytes:
        return b"".join(map(self._framing.event, chunks))

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if more and self._write is not None and self._write(data):
            return
        async with asyncio.timeout(self._times.send_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})
