"""HTTP/1.1 to one gateway of a cell: connections that are reused, and bodies in pieces with backpressure.

Requests of many clients share a connection, so a byte too many in one of them, or in an answer, would give a client the
answer to another's request. What would end a line of a request early is never written, and a connection on which
anything arrives that no request asked for is closed.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from shared.errors import InvalidRequest, Unavailable

Header = tuple[bytes, bytes]

HELD_BYTES = 256 * 1024
"""Bytes of a body that may wait here before reading from the gateway pauses."""

MOST_HEADER_BYTES = 64 * 1024
MOST_IDLE = 64
IDLE_S = 30.0
"""Connections idle for longer are not reused: gateways close theirs after 75 s, and a closing one must not be used."""

NO_HTTP = "invalid_http"
"""Code of a request that cannot be written as HTTP."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"/[\x21-\x7e]*")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class UpstreamLost(Unavailable):
    """The gateway could not be reached, or its connection ended too soon. ``has_answered``: a head had arrived."""

    code = "gateway_lost"
    has_answered = False


class Unreachable(UpstreamLost):
    """There is no connection: the gateway has nothing of the request."""


@dataclass(slots=True)
class UpstreamHead:
    """Status and headers of an answer; names of headers are in lower case."""

    status: int = 0
    headers: list[Header] = field(default_factory=list)

    def header(self, name: bytes) -> bytes:
        """Return the value of the first header of that name, or b""."""
        return next((value for key, value in self.headers if key == name), b"")


class _Connection(asyncio.Protocol):
    """A connection to a gateway, for one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.is_lost = False
        self.is_used = False
        self.is_asked = False  # A request was written, and its answer is not complete.
        self.idle_since_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.head = UpstreamHead()
        self._header_bytes = 0
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._is_paused = False
        self.has_head = False
        self.is_complete = False
        self._may_be_kept = False
        self.has_heard = False

    def send(self, request: bytes, body: bytes | bytearray) -> None:
        self._begin()
        self._news.clear()
        self.is_asked = True
        assert self._transport is not None
        self._transport.write(request)
        if body:
            self._transport.write(body)

    async def wait_head(self) -> UpstreamHead:
        """Wait for the head of the answer. Raises UpstreamLost."""
        while not self.has_head:
            self._check()
            await self._wait()
        return self.head

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamLost where it ends too soon."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                self._held = 0
                self._resume()
                yield piece
            elif self.is_complete:
                return
            else:
                self._check()
                await self._wait()

    @property
    def may_be_kept(self) -> bool:
        return self.is_complete and self._may_be_kept and not self.is_lost

    @property
    def is_idle_too_long(self) -> bool:
        return self.is_lost or self._loop.time() - self.idle_since_s > IDLE_S

    def rest(self) -> None:
        """End the exchange; another may follow on the connection."""
        self.is_used = True
        self.idle_since_s = self._loop.time()
        self._resume()  # A body that was left unread may have paused it.

    def close(self) -> None:
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        if self.is_lost:
            lost = UpstreamLost("the cell's gateway ended the connection")
            lost.has_answered = self.has_head
            raise lost

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        if self.is_asked:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                self.close()
        else:
            self.close()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._news.set()

    # -- callbacks of the parser --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.close()  # A second answer in the packet that completed the first.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_complete:
            return
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MOST_HEADER_BYTES:
            self.close()
            return
        self.head.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        self.head.status = self._parser.get_status_code()
        self._may_be_kept = self._parser.should_keep_alive()
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        if self.is_complete:
            return
        self._pieces.append(body)
        self._held += len(body)
        if self._held > HELD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.is_asked = False

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self.is_lost:
            self._is_paused = False
            self._transport.resume_reading()


class Exchange:
    """One request and its answer.

    It must be closed; unless the answer was read to its end, that closes the connection, and the gateway cancels the
    request.
    """

    def __init__(self, connection: _Connection, head: UpstreamHead, give_back: Callable[[_Connection], None]) -> None:
        """Hold ``connection``, from which ``head`` came, until :meth:`close` calls ``give_back`` with it."""
        self.head = head
        self._connection = connection
        self._give_back = give_back
        self._is_closed = False
        self._read = b""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamLost where it ends too soon."""
        if self._read:
            yield self._read
        async for piece in self._connection.pieces():
            yield piece

    def unread(self, body: bytes) -> None:
        """Put back bytes that :meth:`whole` has read, in front of the body."""
        self._read = body

    async def whole(self, most_bytes: int) -> bytes:
        """Return the body, or its beginning once that has more than ``most_bytes``. Raises UpstreamLost."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > most_bytes:
                break
        return bytes(body)

    def close(self) -> None:
        """End the exchange, and keep or close its connection; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._give_back(self._connection)


class Upstream:
    """One gateway.

    ``is_open`` is the result of its last health check, and ``error`` says why it is not open. ``lost`` is set while it
    does not answer. ``misnamed`` is a sentence on its cell's name where that is not the router's, else "", and
    ``model`` the name of the model that it serves, "" as long as it has not told it.
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, connect_s: float = 1.0) -> None:
        """``url`` is ``http://host:port`` or ``https://host:port``; ``tls`` is used for the latter."""
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._connect_s = connect_s
        self._idle: deque[_Connection] = deque()
        self.in_flight = 0
        self.is_open = True
        self.lost = asyncio.Event()
        self.failures = 0
        self.error = ""
        self.misnamed = ""
        self.model = ""

    async def send(
        self, method: str, target: bytes, headers: Sequence[Header], body: bytes | bytearray = b""
    ) -> Exchange:
        """Send a request and wait for the head of its answer.

        Raises UpstreamLost; InvalidRequest, before anything is written, for a method, target or header with bytes that
        HTTP does not allow there.

        A reused connection that ends before its first byte was closed by the gateway meanwhile: the request is sent
        again on another one.
        """
        request = self._request(method, target, headers, len(body))
        while True:
            connection = self._take_idle() or await self._connect()
            try:
                connection.send(request, body)
                head = await connection.wait_head()
            except UpstreamLost:
                if connection.is_used and not connection.has_heard:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            return Exchange(connection, head, self._give_back)

    def close(self) -> None:
        """Close the idle connections; those in use end with their exchanges."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    _Connection,
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        except TimeoutError as error:
            raise Unreachable(f"no connection to {self.url} within {self._connect_s:g} s") from error
        except OSError as error:
            raise Unreachable(f"no connection to {self.url}: {error}") from error
        return connection

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_idle_too_long:
                return connection
            connection.close()
        return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.may_be_kept and len(self._idle) < MOST_IDLE:
            connection.rest()
            self._idle.append(connection)
        else:
            connection.close()

    def _request(self, method: str, target: bytes, headers: Sequence[Header], length: int) -> bytes:
        verb = method.encode("ascii", "replace")
        if not _TOKEN.fullmatch(verb) or not _TARGET.fullmatch(target):
            raise InvalidRequest("the request's method or path has characters that HTTP does not allow", code=NO_HTTP)
        if not all(_TOKEN.fullmatch(name) and _VALUE.fullmatch(value) for name, value in headers):
            raise InvalidRequest("a header of the request has characters that HTTP does not allow", code=NO_HTTP)
        lines = [b"%s %s HTTP/1.1" % (verb, target), b"host: " + self._authority]
        lines += [name + b": " + value for name, value in headers]
        if length or method == "POST":
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join([*lines, b"", b""])
