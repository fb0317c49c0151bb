"""The HTTP protocol of uvicorn, with bounds on connections and headers.

Its errors below the application have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from weakref import ref

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.connections import Connections
from services.gateway.event_stream import ABORT_EXTENSION, WRITE_EXTENSION
from services.gateway.listening_metrics import SLOW
from services.gateway.openai_schema.errors import error_body
from shared.errors import InvalidRequest, ThermoclineError, TooManyConnections

MAX_HEADER_BYTES = 64 * 1024
"""Limit on a request's headers, and on the bytes that the parser is fed without completing a head, a part of a body or
a message: it keeps a header that has not ended, and so do trailers and the lines between chunks.
"""

DRAIN_S = 1.0
DRAIN_BYTES = 1024 * 1024
"""Bounds on reading a body behind its answer. A client that is still sending would otherwise lose the answer, and an
ordinary one, refused before its body, would lose its connection.
"""


class GatewayHttpProtocol(HttpToolsProtocol):
    """The protocol of one client connection."""

    _header_bytes = 0
    _unparsed_bytes = 0  # Fed since the parser last completed something.
    _has_completed = False
    _is_in_head = False
    _drained_bytes = 0

    def __init__(self, *arguments: Any, bounds: Connections, **named: Any) -> None:
        """``bounds`` are shared by all connections of the server."""
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._is_admitted = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection as idle, or refuse it when the server has its maximum."""
        super().connection_made(transport)
        self._is_admitted = self._bounds.admit(self)
        if self._is_admitted:
            self._expect_request()  # Until its first byte it is as idle as one between two requests.
        else:
            self._refuse(TooManyConnections("the server has as many connections as it takes; try again shortly"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and remove the connection from the count."""
        self._stop_expecting()
        self._stop_draining()
        self._bounds.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, in parts that the bound on headers allows; on a refused or closing connection it is dropped."""
        view = data if len(data) <= MAX_HEADER_BYTES else memoryview(data)
        for start in range(0, len(data), MAX_HEADER_BYTES):
            if self._is_admitted and not self.transport.is_closing():
                self._parse(view[start : start + MAX_HEADER_BYTES])

    def make_way(self) -> None:
        """Close the idle connection (:class:`~services.gateway.connections.Connection`)."""
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Stop the timer of the head, and give the request's scope the extension that writes at once.

        HTTP/1.0 has no chunked coding (RFC 9112, section 6.1): a body without a length ends with the connection.
        """
        self._stop_expecting()
        self._is_in_head, self._has_completed = False, True
        super().on_headers_complete()
        if (
            self.cycle is not None and self.cycle.scope is self.scope
        ):  # False where the client asked for another protocol.
            # The cycle has the scope, and both are freed without the collector.
            self.scope["extensions"][WRITE_EXTENSION] = partial(_write, ref(self.cycle))  # type: ignore[assignment]
            self.cycle.transport = _HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; one that is already answered is dropped."""
        self._has_completed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request has arrived; behind an answer, the connection waits for another one."""
        self._has_completed = True
        super().on_message_complete()
        if self._drain_timer is not None:
            self._stop_draining()
            self._expect_request()

    def on_response_complete(self) -> None:
        """Count the connection as idle again, unless the next request has begun.

        A body that is still arriving is read on for a short time, after which the connection is closed.
        """
        super().on_response_complete()  # May begin the next of several requests that came at once.
        if self.cycle.response_complete and not self.transport.is_closing() and self._head_timer is None:
            self._bounds.rests(self)
            if self.cycle.more_body:
                self._unset_keepalive_if_required()
                self._drained_bytes = 0
                self._drain_timer = self.loop.call_later(DRAIN_S, self.transport.close)

    def on_message_begin(self) -> None:
        """Count the connection as busy, start the timer of the head, and give the request its abort extension."""
        self._bounds.asks(self)
        self._unset_keepalive_if_required()  # Of a request in the same bytes as the end of the one before.
        self._is_in_head, self._has_completed = True, True
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
        """Count name and value towards the bound on headers; trailers, which come behind the body, are dropped."""
        self._count(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's shape, and close the connection."""
        self._refuse_message(InvalidRequest(msg, code="invalid_http"))

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser, and end a connection whose data completes nothing, or that sends too much behind an answer.

        ``data`` is at most MAX_HEADER_BYTES.
        """
        self._has_completed = False
        was_waiting = self.timeout_keep_alive_task is not None
        super().data_received(data)  # type: ignore[arg-type]
        self._unparsed_bytes = 0 if self._has_completed else self._unparsed_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._unparsed_bytes > MAX_HEADER_BYTES:
            self._refuse_message(InvalidRequest("the request's headers are too large", code="invalid_http"))
        elif was_waiting and not self._has_completed:
            self._expect_request()  # Empty lines before a request; the timer was stopped.
        elif self._drain_timer is not None:
            self._drained_bytes += len(data)
            if self._drained_bytes > DRAIN_BYTES:
                self.transport.close()

    def _refuse_message(self, error: ThermoclineError) -> None:
        """Send an error as the answer to the request that is arriving, or only end the connection within another."""
        if self._drain_timer is not None:
            self.transport.close()  # The request was answered; the answer may still be in the buffer.
            return
        cycle = self.cycle
        is_next = self._is_in_head or bool(self.pipeline)  # It arrives behind a request in progress.
        is_due = cycle is None or cycle.response_complete or not (is_next or cycle.response_started)
        if is_due:
            self._refuse(error)
        else:
            self._stop_expecting()
            self.transport.abort()

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

    def _expect_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _stop_draining(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

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
            f"the head of the request was not complete within {self._bounds.head_s:g} s",
            code="head_timeout",
            status=408,
        )
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


def _write(told: ref[RequestResponseCycle], data: bytes) -> bool:
    """Write a part of a body at once, as ``cycle.send`` would, and return whether it was written.

    It is not written where that would have to wait or is not valid.
    """
    cycle = told()
    if cycle is None or not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
        return False
    if cycle.disconnected or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
