"""The HTTP protocol of uvicorn, with bounds on connections and headers.

Its errors below the application have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.connections import Connections
from services.gateway.event_stream import ABORT_EXTENSION, WRITE_EXTENSION
from services.gateway.listening_metrics import SLOW
from services.gateway.openai_schema.errors import error_body
from shared.errors import InvalidRequest, ThermoclineError, TooManyConnections

MAX_HEADER_BYTES = 64 * 1024


class GatewayHttpProtocol(HttpToolsProtocol):
    """The protocol of one client connection."""

    _header_bytes = 0

    def __init__(self, *arguments: Any, bounds: Connections, **named: Any) -> None:
        """``bounds`` are shared by all connections of the server."""
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._is_admitted = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection as idle, or refuse it when the server has its maximum."""
        super().connection_made(transport)
        self._is_admitted = self._bounds.admit(self)
        if self._is_admitted:
            # Until its first byte it is as idle as one between two requests.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self._refuse(TooManyConnections("the server has as many connections as it takes; try again shortly"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the head, and remove the connection from the count."""
        self._stop_expecting()
        self._bounds.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data as of a connection in use; data on a refused or closing connection is dropped."""
        if self._is_admitted and not self.transport.is_closing():
            self._bounds.asks(self)
            super().data_received(data)

    def make_way(self) -> None:
        """Close the idle connection (:class:`~services.gateway.connections.Connection`)."""
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Stop the timer of the head, and give the request's scope the extension that writes at once.

        HTTP/1.0 has no chunked coding (RFC 9112, section 6.1): a body without a length ends with the connection.
        """
        self._stop_expecting()
        super().on_headers_complete()
        if (
            self.cycle is not None and self.cycle.scope is self.scope
        ):  # False where the client asked for another protocol.
            self.scope["extensions"][WRITE_EXTENSION] = partial(_write, self.cycle)  # type: ignore[assignment]
            self.cycle.transport = _HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]

    def on_response_complete(self) -> None:
        """Count the connection as idle again, unless the next request has begun."""
        super().on_response_complete()  # May begin the next of several requests that came at once.
        if self.cycle.response_complete and not self.transport.is_closing() and self._head_timer is None:
            self._bounds.rests(self)

    def on_message_begin(self) -> None:
        """Start the timer of the head, and add the abort extension to the new request's scope."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()
        self._header_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """Count the URL towards the bound on headers."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count name and value towards the bound on headers."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's shape, and close the connection."""
        self._refuse(InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, error: ThermoclineError) -> None:
        """Send an error below the application, and close the connection."""
        self._stop_expecting()
        body = error_body(error)
        head = [STATUS_LINE[error.status]]
        head += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        head.append(b"content-type: application/json\r\nconnection: close\r\n")
        head.append(b"content-length: " + str(len(body)).encode() + b"\r\n\r\n")
        self.transport.write(b"".join(head) + body)
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._bounds.head_s, self._head_is_late)

    def _stop_expecting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        SLOW.inc()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # An answer to an earlier request is in progress: no other can be sent within it.
            return
        late = InvalidRequest(
            f"the head of the request was not complete within {self._bounds.head_s:g} s", code="head_timeout"
        )
        late.status = 408
        self._refuse(late)

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > MAX_HEADER_BYTES:
            # The parser turns what a callback raises into its own error, which ends in send_400_response.
            raise ValueError("the request's headers are too large")


class _HeadWithBody:
    """A transport that sends the head of an answer together with body written in the same turn of the event loop.

    uvloop sends at once. A head alone would wake the client, on a busy machine in our place, and the first token would
    wait behind it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None  # Empty once it is sent.

    def write(self, data: bytes) -> None:
        """Write a part of the answer, the head first."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._send_head)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class _Unchunked:
    """The ``send`` of an answer over HTTP/1.0: a body without a length is written as it is."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._has_length = cycle, cycle.send, False

    async def __call__(self, message: ASGISendEvent) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))  # The cycle expects no more than this.
        await self._send(message)


def _write(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a part of a body at once, as ``cycle.send`` would, and return whether it was written.

    It is not written where that would have to wait or is not valid.
    """
    is_within = cycle.response_started and not cycle.response_complete and cycle.chunked_encoding
    if not is_within or cycle.disconnected or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
