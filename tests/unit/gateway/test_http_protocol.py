"""What a connection writes, and in how many writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from services.gateway import http_protocol
from services.gateway.connections import Connections
from services.gateway.event_stream import WRITE_EXTENSION
from services.gateway.http_protocol import DRAIN_BYTES, MAX_HEADER_BYTES, GatewayHttpProtocol

ASK = b"%b /answer HTTP/1.1\r\nhost: h\r\n%b\r\n"


class Wire:
    """The transport of a connection; ``writes`` are those that reached it, each a system call under uvloop."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.writes.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return None


class Connected:
    """A connection to ``app``."""

    def __init__(self, app: ASGIApp) -> None:
        self.state = ServerState()
        self.bounds = Connections(8, 60.0)
        config = Config(app, log_config=None, access_log=False)
        self.protocol = GatewayHttpProtocol(config, self.state, {}, bounds=self.bounds)
        self.wire = Wire()
        self.protocol.connection_made(cast(asyncio.Transport, self.wire))

    @property
    def sent(self) -> bytes:
        """All bytes that were written."""
        return b"".join(self.wire.writes)

    async def receive(self, data: bytes, *, answers: bool = True) -> None:
        """Take data as from the network; ``answers``: until all requests that began are answered."""
        self.protocol.data_received(data)
        while answers and self.state.tasks:
            await asyncio.gather(*self.state.tasks)
        await asyncio.sleep(0)


async def writes_of(app: ASGIApp, *asked: bytes) -> list[bytes]:
    """What the answers to requests on one connection were written as."""
    connected = Connected(app)
    for data in asked:
        await connected.receive(data)
    connected.protocol.connection_lost(None)
    return connected.wire.writes


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """The first part is sent; the second one is written past the application."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    assert scope["extensions"][WRITE_EXTENSION](b"second")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_the_head_of_a_stream_leaves_with_its_first_part() -> None:
    """A client is woken for its first token, and not for a head before it."""
    writes = await writes_of(stream, ASK % (b"GET", b""))

    assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert writes[0].endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert writes[1:] == [b"6\r\nsecond\r\n", b"0\r\n\r\n"]


async def test_a_stream_over_http_1_0_ends_with_its_connection() -> None:
    """That version has no chunked coding."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if not scope["extensions"][WRITE_EXTENSION](b"second"):
            await send({"type": "http.response.body", "body": b"second", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    asked = (ASK % (b"GET", b"")).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = b"".join(await writes_of(plain, asked)).partition(b"\r\n\r\n")
    whole = b"".join(await writes_of(Response(b"whole"), asked))

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"firstsecond"
    assert b"content-length: 5\r\n" in whole
    assert whole.endswith(b"\r\n\r\nwhole")


@pytest.mark.parametrize("response", [Response(b"whole"), Response(status_code=204)])
async def test_a_whole_answer_is_one_write(response: Response) -> None:
    """Each on a connection that is kept, also one without a body."""
    writes = await writes_of(response, ASK % (b"GET", b""), ASK % (b"GET", b""))

    assert len(writes) == 2
    assert writes[0] == writes[1]
    assert writes[0].startswith(b"HTTP/1.1 %d" % response.status_code)
    assert writes[0].endswith(b"\r\n\r\n" + bytes(response.body))


async def test_the_head_of_an_answer_that_has_no_body_is_written() -> None:
    """To HEAD."""
    (head,) = await writes_of(Response(b"whole"), ASK % (b"HEAD", b""))

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")


async def test_a_head_does_not_wait_for_a_body_that_is_long_in_coming() -> None:
    """Only for what comes in the same turn of the loop."""
    heads: list[int] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0)
        heads.append(1)
        await send({"type": "http.response.body", "body": b"body", "more_body": False})

    writes = await writes_of(slow, ASK % (b"GET", b""))

    assert heads
    assert writes[0].endswith(b"\r\n\r\n")
    assert writes[1] == b"4\r\nbody\r\n0\r\n\r\n"


async def test_the_head_of_an_answer_that_fails_is_written_before_the_end() -> None:
    """The client learns what it was to be."""

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("wrong")

    (head,) = await writes_of(failing, ASK % (b"GET", b""))

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_that_waits_with_its_body_is_told_to_send_it() -> None:
    """Before the answer."""

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await Response(message["body"])(scope, receive, send)

    asked = ASK % (b"POST", b"content-length: 4\r\nexpect: 100-continue\r\n")
    writes = await writes_of(echo, asked + b"body")

    sent = b"".join(writes)
    assert sent.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert sent.endswith(b"\r\n\r\nbody")


POSTED = b"POST /answer HTTP/1.1\r\nhost: h\r\n%b\r\n"
CHUNKED = POSTED % b"transfer-encoding: chunked\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The names of the request's headers, and its body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = b" ".join(name for name, _ in scope["headers"])
    await Response(names + b"; " + body)(scope, receive, send)


@pytest.mark.parametrize(
    "begun",
    [b"GET /", b"GET / HTTP/1.1\r\nx-long", b"GET / HTTP/1.1\r\nx-long: ", CHUNKED + b"0\r\nx-long: ",
     CHUNKED + b"0\r\nx-long", CHUNKED + b"3;x-long=", CHUNKED + b"3\r\nabc\r\n0\r\nx-a: 1\r\nx-long: ", b""],
)  # fmt: skip
@pytest.mark.parametrize("part_bytes", [1000, 64 * 1024, 1024 * 1024])
async def test_what_never_ends_is_refused_at_the_bound(begun: bytes, part_bytes: int) -> None:
    """A URL, a header, a trailer, a line between chunks or empty lines: memory and time stay bounded."""
    connected = Connected(echo)
    await connected.receive(begun, answers=False)
    fill, sent = (b"A" if begun else b"\r\n") * part_bytes, 0
    while not connected.wire.is_closed:
        assert sent <= 3 * MAX_HEADER_BYTES + part_bytes
        await connected.receive(fill[:part_bytes], answers=False)
        sent += part_bytes

    assert connected.sent.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'"code":"invalid_http"' in connected.sent


async def test_many_trailers_are_refused_at_the_bound() -> None:
    """As many headers are."""
    connected = Connected(echo)
    await connected.receive(CHUNKED + b"0\r\n" + b"x-a: 0123456789\r\n" * 6000, answers=False)

    assert connected.sent.startswith(b"HTTP/1.1 400 Bad Request\r\n")


async def test_a_head_that_is_followed_by_a_long_body_is_not_too_large() -> None:
    """In the same bytes, and with its first byte before them."""
    asked = POSTED % (b"x-a: %b\r\ncontent-length: 300000\r\n" % (b"b" * 60_000)) + b"c" * 300_000
    connected = Connected(echo)
    await connected.receive(asked[:1], answers=False)
    await connected.receive(asked[1:])

    assert connected.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert connected.sent.endswith(b"host x-a content-length; " + b"c" * 300_000)


async def test_trailers_are_no_headers() -> None:
    """A key behind the body opens nothing, neither for this request nor for the next one."""
    connected = Connected(echo)
    await connected.receive(CHUNKED + b"1\r\nb\r\n0\r\nauthorization: Bearer key\r\n\r\n")
    await connected.receive(ASK % (b"GET", b""))

    assert connected.sent.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"authorization" not in connected.sent
    assert b"host transfer-encoding; b" in connected.sent


async def test_a_request_that_is_refused_before_its_body_keeps_its_connection() -> None:
    """The rest of the body is dropped, and the next request is answered; meanwhile the connection may be closed."""
    connected = Connected(Response(b"whole", 401))
    await connected.receive(POSTED % b"content-length: 100000\r\n" + b"b" * 10)
    idle = connected.bounds.idle
    await connected.receive(b"b" * 99_990 + ASK % (b"GET", b""))

    assert idle == 1
    assert not connected.wire.is_closed
    assert connected.sent.count(b"HTTP/1.1 401 Unauthorized\r\n") == 2


async def test_a_body_behind_its_answer_is_read_up_to_a_bound() -> None:
    """Then the connection is closed, and counts as idle until then."""
    connected = Connected(Response(b"whole", 405))
    await connected.receive(POSTED % b"content-length: 100000000\r\n")
    read = 0
    while not connected.wire.is_closed:
        assert connected.bounds.idle == 1
        assert read <= DRAIN_BYTES
        await connected.receive(b"b" * 50_000)
        read += 50_000

    assert connected.sent.endswith(b"whole")


async def test_a_body_that_trickles_in_behind_its_answer_is_read_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a byte comes."""
    monkeypatch.setattr(http_protocol, "DRAIN_S", 0.02)
    connected = Connected(Response(b"whole", 405))
    await connected.receive(POSTED % b"content-length: 100000000\r\n{")

    async with asyncio.timeout(10):
        while not connected.wire.is_closed:
            await connected.receive(b" ")


async def test_bytes_that_begin_no_request_leave_a_connection_idle() -> None:
    """Empty lines between requests are allowed."""
    connected = Connected(Response(b"whole"))
    await connected.receive(b"\r\n")

    assert connected.bounds.idle == 1
    assert connected.protocol.timeout_keep_alive_task is not None


async def test_an_error_behind_a_request_in_progress_is_not_written_into_its_answer() -> None:
    """The connection ends."""
    begun = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    connected = Connected(slow)
    await connected.receive(ASK % (b"GET", b""), answers=False)
    await begun.wait()
    await connected.receive(b"no http\r\n\r\n", answers=False)
    for task in connected.state.tasks:
        task.cancel()

    assert connected.wire.is_closed
    assert b"400" not in connected.sent
