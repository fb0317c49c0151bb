"""An answer on its way from a cell to the client, and what the client is told when the cell is lost meanwhile.

A stream passes event by event as it comes; only the part of an event that a packet cut off waits for its rest. An
answer that is no stream is held until it is whole, up to ``WHOLE_BYTES``, so that one whose cell is lost can still be
asked of another. A stream that has begun is not taken up by another cell: its text would have to be tokenized again,
which need not give the tokens that were sampled, and a draw depends on the place of each. It ends with an error in
the shape of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import Send

from services.gateway.router.paths import last_event
from services.gateway.router.upstream import Exchange, Header, UpstreamLost
from shared.errors import RequestCancelled, Unavailable

WHOLE_BYTES = 2**20
MOST_EVENT_BYTES = 2**20
"""Of an event whose end has not come; more is passed on as it is."""

_NAME = b"event: "

HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"proxy-connection"),
    )
)
"""Headers about one connection (RFC 9110, 7.6.1)."""

CELL_HEADER = b"x-thermocline-cell"


class SlowClient(RequestCancelled):
    """The client took nothing for too long."""

    code = "client_too_slow"


class StreamLost(Unavailable):
    """The cell was lost behind the first bytes of an answer. ``was_told``: the client has it as its last event."""

    code = "cell_lost"
    was_told = False


class EventCutter:
    """Cuts a stream into whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self.named = 0  # Events with a name that are whole.

    def take(self, data: bytes) -> bytes:
        """Return what is whole by now."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            end = len(data) if len(data) > MOST_EVENT_BYTES else 0
        self._rest = data[end:]
        whole = data[:end]
        self.named += whole.startswith(_NAME) + whole.count(b"\n" + _NAME)
        return whole

    def take_rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest


class Relay:
    """Sends one answer. ``has_begun`` says whether anything has been sent."""

    def __init__(self, send: Send, *, idle_s: float, send_s: float, is_gone: Callable[[], bool], path: str) -> None:
        """``path`` is the one that was asked: its API says how a stream ends that breaks."""
        self._send_message = send
        self._idle_s = idle_s
        self._send_s = send_s
        self._is_gone = is_gone
        self._path = path
        self.has_begun = False

    async def relay(self, exchange: Exchange, cell: str) -> None:
        """Pass an answer on. Raises UpstreamLost while nothing has been sent, StreamLost when the client has a part,
        RequestCancelled when the client is gone.
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
        except UpstreamLost as error:
            lost = StreamLost(
                f"cell {cell} was lost while it answered; ask again", retry_after_ms=error.retry_after_ms or 1_000
            )
            await self._send(last_event(self._path, lost, cutter.named), more=False)
            lost.was_told = True
            raise lost from error

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
        headers = [*forwardable(exchange.head.headers), (CELL_HEADER, cell.encode())]
        self.has_begun = True
        await self._deliver({"type": "http.response.start", "status": exchange.head.status, "headers": headers})

    async def _pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """Yield pieces. Raises UpstreamLost also when nothing comes for too long."""
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
                if self._is_gone():
                    raise RequestCancelled("the client went away", code="client_disconnected") from None
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


def forwardable(headers: list[Header]) -> list[Header]:
    """Headers without those that are about one connection."""
    named = {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",") if name
    }
    return [(key, value) for key, value in headers if key not in HOP_BY_HOP and key not in named]
