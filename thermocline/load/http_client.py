"""HTTP/1.1 for one server, with the time at which each piece of a body arrived.

A general client takes about 150 µs of processor time per message of a stream, so a few thousand tokens a second would
keep it busy and make the server look slow. Here the loop's own callback takes the time and hands the piece on: no task
is woken for it, and C parses it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools
import httpx

from thermocline.client import RequestError
from thermocline.load.clock import Clock

OnData = Callable[[bytes, float], None]
"""Takes a piece of a body and its time of arrival, in seconds of the run's clock. May raise RequestError."""

OK = 200
_MAX_HELD_BYTES = 16 * 2**20
"""Largest body without an ``on_data``."""

_MOST_IDLE_S = 2.0
"""Servers close idle connections after some seconds; one that is about to be closed must not be written to."""


@dataclass(slots=True)
class Response:
    """A response. ``body`` is empty where ``on_data`` got it. Names of headers are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Http(Protocol):
    """Sends requests: an HttpClient, or a fake in tests."""

    async def send(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        """Send a request. Raises RequestError. ``on_data``, if given, gets the body of status 200 in pieces."""


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time. ``is_idle_since_s`` is when the last one ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._pieces: list[bytes] = []
        self._held = 0
        self._on_data: OnData | None = None
        self._done: asyncio.Future[None] | None = None
        self._is_complete = False
        self._may_be_kept = False
        self.is_closed = False
        self.is_idle_since_s = 0.0

    async def send(self, request: bytes, on_data: OnData | None) -> Response:
        """Send a request. Raises RequestError; then, or when cancelled, the connection is closed."""
        assert self._transport is not None
        if self.is_closed:
            raise RequestError("connection_broken", "the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._pieces, self._held, self._on_data = Response(), [], 0, on_data
        self._is_complete = self._may_be_kept = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None
        if not self._may_be_kept:
            self.close()
        self.is_idle_since_s = self._clock.now_s()
        self._response.body = b"".join(self._pieces)
        return self._response

    def close(self) -> None:
        """Close the connection at once, even during an exchange."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now_s = self._clock.now_s()
        try:
            self._parser.feed_data(data)
            if self._on_data is not None and self._response.status == OK:
                pieces, self._pieces, self._held = self._pieces, [], 0
                for piece in pieces:
                    self._on_data(piece, now_s)
            elif self._held > _MAX_HELD_BYTES:
                raise RequestError("bad_response", f"more than {_MAX_HELD_BYTES} bytes")
            if self._is_complete:
                self._finish()
        except RequestError as error:
            self._fail(error)
        except httptools.HttpParserError as error:
            self._fail(RequestError("bad_response", f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if error is None and self._response.status:
            # A body without a length ends with the connection. Its reader knows whether it is whole.
            self._finish()
        else:
            self._fail(RequestError("connection_broken", str(error or "the server closed the connection")))

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        self._is_complete = True
        # Later the parser answers for the next message.
        self._may_be_kept = self._parser.should_keep_alive()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: RequestError) -> None:
        self.is_closed = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpClient:
    """Connections to one server, kept between requests."""

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Clock, *, connect_timeout_s: float) -> None:
        """``base_url`` begins with http:// or https:// and has no query."""
        url = httpx.URL(base_url)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.raw_host.decode("ascii"), url.port or (443 if self._tls else 80)
        self._root = url.raw_path.decode("ascii").rstrip("/")
        lines = {"Host": url.netloc.decode("ascii"), "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        """Send a request over a kept or new connection, as :class:`Http` says."""
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        connection = self._kept() or await self._connected()
        response = await connection.send(head.encode("latin-1") + body, on_data)
        if not connection.is_closed:
            self._idle.append(connection)
        return response

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        """Return the most recently used open connection, and close expired ones; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and self._clock.now_s() - connection.is_idle_since_s < _MOST_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._clock), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise RequestError("connect_timeout", f"no connection within {self._connect_timeout_s:g} s") from error
        except ssl.SSLError as error:
            raise RequestError("tls_failed", str(error)) from error
        except OSError as error:
            raise RequestError("connection_refused", str(error)) from error
        return connection
