"""Relaying of an answer from a cell to the client, and of an error when the cell is lost meanwhile.

A stream is passed on event by event as it arrives; only the part of an event that a packet cut off waits for its rest.
An answer that is no stream is held until it is whole, up to ``WHOLE_BYTES``, so that another cell can still be asked if
its cell is lost. A stream that has begun is not continued by another cell: its text would have to be tokenized again,
which need not give the tokens that were sampled, and a draw depends on the position of each. It ends with an error in
the shape of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import Scope, Send

from services.gateway.router.paths import last_event
from services.gateway.router.upstream import Exchange, Header, UpstreamLost
from shared.errors import RequestCancelled, ThermoclineError, Unavailable

WHOLE_BYTES = 2**20
MOST_EVENT_BYTES = 2**20
"""Bytes of an event held until its end arrives; more is passed on unfinished."""

_NAME = b"event: "

HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"proxy-connection"),
    )
)
"""Headers that concern a single connection (RFC 9110, 7.6.1)."""

CELL_HEADER = b"x-thermocline-cell"
CLIENT_HEADER = b"x-forwarded-for"


class SlowClient(RequestCancelled):
    """The client read nothing for too long."""

    code = "client_too_slow"


class StreamEnded(Unavailable):
    """The end of an answer, after its first bytes, with an error.

    If ``was_told``, the client got the error as its last event.
    """

    was_told = False


class StreamLost(StreamEnded):
    """The loss of the cell after the first bytes of an answer."""

    code = "cell_lost"


class EventCutter:
    """A splitter of a stream into whole events."""

    def __init__(self) -> None:
        """Begin at the start of a stream."""
        self._rest = b""
        self.named = 0  # Whole events with a name.

    def take(self, data: bytes) -> bytes:
        """Add data; return the events that are whole now."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            end = len(data) if len(data) > MOST_EVENT_BYTES else 0
        self._rest = data[end:]
        whole = data[:end]
        self.named += whole.startswith(_NAME) + whole.count(b"\n" + _NAME)
        return whole

    def take_rest(self) -> bytes:
        """Return the unfinished event at the end of a stream."""
        rest, self._rest = self._rest, b""
        return rest


class Relay:
    """The sender of one answer."""

    def __init__(
        self,
        send: Send,
        *,
        idle_s: float,
        send_s: float,
        why_ended: Callable[[], ThermoclineError | None],
        path: str,
    ) -> None:
        """``path`` is the one that was requested: its API defines how a broken stream ends.

        ``why_ended`` returns why the request was ended, None where its cell was lost.
        """
        self._send_message = send
        self._idle_s = idle_s
        self._send_s = send_s
        self._why_ended = why_ended
        self._path = path

    async def relay(self, exchange: Exchange, cell: str) -> None:
        """Pass an answer on.

        Raises UpstreamLost while nothing has been sent, StreamLost when the client has a part, RequestCancelled when
        the client has disconnected or reads too slowly, and what ended the request otherwise: StreamEnded once that is
        the stream's last event.
        """
        if exchange.head.header(b"content-type").startswith(b"text/event-stream"):
            await self._stream(exchange, cell)
        else:
            await self._whole(exchange, cell)

    async def _stream(self, exchange: Exchange, cell: str) -> None:
        cutter = EventCutter()
        await self._begin(exchange, cell)
        try:
            async for piece in self._pieces(exchange):
                events = cutter.take(piece)
                if events:
                    await self._send(events)
            await self._send(cutter.take_rest(), more=False)
        except RequestCancelled:
            raise
        except ThermoclineError as error:
            told = error
            if isinstance(error, UpstreamLost):
                wait_ms = error.retry_after_ms or 1_000
                told = StreamLost(f"cell {cell} was lost while it answered; ask again", retry_after_ms=wait_ms)
            await self._send(last_event(self._path, told, cutter.named), more=False)
            ended = told if isinstance(told, StreamLost) else StreamEnded(told.message, code=told.code)
            ended.was_told = True
            raise ended from error

    async def _whole(self, exchange: Exchange, cell: str) -> None:
        held = bytearray()
        pieces = self._pieces(exchange)
        async for piece in pieces:
            held += piece
            if len(held) > WHOLE_BYTES:
                break
        await self._begin(exchange, cell)
        await self._send(bytes(held))
        try:
            async for piece in pieces:
                await self._send(piece)
        except UpstreamLost as error:
            raise StreamLost(f"cell {cell} was lost while it answered") from error
        await self._send(b"", more=False)

    async def _begin(self, exchange: Exchange, cell: str) -> None:
        # The server dates its answers itself.
        passed = [(key, value) for key, value in forwardable(exchange.head.headers) if key != b"date"]
        headers = [*passed, (CELL_HEADER, cell.encode())]
        await self._deliver({"type": "http.response.start", "status": exchange.head.status, "headers": headers})

    async def _pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """Yield pieces of the body. Raises UpstreamLost also when none arrives for too long."""
        pieces = exchange.pieces()
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise UpstreamLost(f"nothing came for {self._idle_s:g} s") from error
            except UpstreamLost:
                why = self._why_ended()
                if why is not None:
                    raise why from None
                raise
            yield piece

    async def _send(self, data: bytes, *, more: bool = True) -> None:
        await self._deliver({"type": "http.response.body", "body": data, "more_body": more})

    async def _deliver(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._send_s):
                await self._send_message(message)
        except TimeoutError as error:
            raise SlowClient("the client reads too slowly") from error


def sent_headers(scope: Scope) -> list[Header]:
    """Return a request's headers for a gateway: those that may pass, and the client's address as this server knows it.

    What a client says of its own address would stand in the gateway's log.
    """
    headers = [(key, value) for key, value in forwardable(scope["headers"]) if key != CLIENT_HEADER]
    client = scope.get("client")
    return [*headers, (CLIENT_HEADER, client[0].encode("latin-1", "replace"))] if client else headers


def forwardable(headers: list[Header]) -> list[Header]:
    """Return the headers without those that concern a single connection."""
    named = {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",") if name
    }
    return [(key, value) for key, value in headers if key not in HOP_BY_HOP and key not in named]
