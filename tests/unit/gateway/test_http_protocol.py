"""What a connection writes, and in how many writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from services.gateway.connections import Connections
from services.gateway.event_stream import WRITE_EXTENSION
from services.gateway.http_protocol import GatewayHttpProtocol

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


async def writes_of(app: ASGIApp, *asked: bytes) -> list[bytes]:
    """What the answers to requests on one connection were written as."""
    state = ServerState()
    config = Config(app, log_config=None, access_log=False)
    protocol = GatewayHttpProtocol(config, state, {}, bounds=Connections(8, 60.0))
    wire = Wire()
    protocol.connection_made(cast(asyncio.Transport, wire))
    for data in asked:
        protocol.data_received(data)
        while state.tasks:
            await asyncio.gather(*state.tasks)
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return wire.writes


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
