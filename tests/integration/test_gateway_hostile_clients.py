"""Clients that are slow, many, or send more than they should cost those that are not nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.waiting import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@contextlib.asynccontextmanager
async def connected(harness: Harness) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a gateway, byte by byte."""
    address = urlsplit(harness.base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def answer_of(data: bytes) -> tuple[int, str]:
    """Status and code of an error."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"P", b"POST /v1/completions HTTP/1.1\r\nhost", HEAD])
async def test_a_head_that_does_not_end_is_ended(sent: bytes) -> None:
    """The time of a head is bounded, however much of it came."""
    async with running_gateway(over_http=True, head_timeout_ms=50) as harness, connected(harness) as (reader, writer):
        writer.write(sent)
        data = await reader.read()

    assert answer_of(data) == (408, "head_timeout")


async def test_the_time_of_a_head_begins_anew_with_each_request() -> None:
    """On a connection that is kept: it is not counted while nothing comes, nor while an answer is made."""
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(running_gateway(says("hi"), over_http=True, head_timeout_ms=1500))
        reader, writer = await stack.enter_async_context(connected(harness))
        for _ in range(2):
            writer.write(HEAD + b"content-length: 15\r\n\r\n" + b'{"prompt":"hi"}')
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert b" 200 " in head
            await reader.readexactly(length)
        writer.write(b"G")
        data = await reader.read()

    assert answer_of(data) == (408, "head_timeout")


async def test_connections_are_bounded() -> None:
    """Idle ones make way for new ones; where none is idle, a new one is told so and closed."""
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(running_gateway(over_http=True, max_connections=2))
        idle, _ = await stack.enter_async_context(connected(harness))
        for _ in range(2):
            _, busy = await stack.enter_async_context(connected(harness))
            busy.write(HEAD)
        gone = await idle.read()
        await until(lambda: not harness.connections.idle)
        refused, _ = await stack.enter_async_context(connected(harness))
        data = await refused.read()

    assert gone == b""
    assert answer_of(data) == (429, "too_many_requests")


async def test_clients_that_drip_their_bodies_hold_no_slot() -> None:
    """As many as there are slots, and others are answered as if they were not there."""
    async with contextlib.AsyncExitStack() as stack:
        harness = await stack.enter_async_context(running_gateway(says("hi"), over_http=True, max_inflight=2))
        for _ in range(8):
            _, writer = await stack.enter_async_context(connected(harness))
            writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
        answered = await harness.client.post("/v1/completions", json={"prompt": "hi"})
        used = harness.gateway.slots.used

    assert answered.status_code == 200
    assert used == 0


async def test_bodies_that_are_held_are_bounded_together() -> None:
    """What is long is refused beyond the bound, which what is short never is; and all is given back."""
    long = b"x" * 700_000
    async with running_gateway(says("hi"), over_http=True, max_buffered_bytes=2**20) as harness:
        bodies = harness.gateway.bodies
        async with connected(harness) as (_, writer):
            writer.write(HEAD + b"content-length: 700001\r\n\r\n" + long)
            await until(lambda: bodies.held_bytes == len(long))
            refused = await harness.client.post("/v1/completions", content=long)
            answered = await harness.client.post("/v1/completions", json={"prompt": "hi"})
        await until(lambda: bodies.held_bytes == 0)
        malformed = await harness.client.post("/v1/completions", content=long)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert answered.status_code == 200
    assert malformed.status_code == 400
    assert bodies.held_bytes == 0
