"""What a router writes to a gateway, and what it takes for that gateway's answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gateway.router.upstream import Upstream
from shared.errors import InvalidRequest
from tests.unit.gateway.router.scripted_gateway import Call, ScriptedGateway, answers, routing
from tests.waiting import until

SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray"


@asynccontextmanager
async def upstream_of(gateway: ScriptedGateway) -> AsyncIterator[Upstream]:
    await gateway.start()
    upstream = Upstream(gateway.url)
    try:
        yield upstream
    finally:
        upstream.close()
        await gateway.stop()


async def get(upstream: Upstream, target: bytes = b"/x") -> bytes:
    exchange = await upstream.send("GET", target, ())
    try:
        return await exchange.whole(1024)
    finally:
        exchange.close()


@pytest.mark.parametrize("under", ["/v1/models/", "/v1/responses/"])
@pytest.mark.parametrize(
    "name",
    [
        "a%20b",
        "%C3%BC",
        "a%3Fb",
        "a%23b",
        "a%2Fb",
        "x%20HTTP/1.1%0D%0Ahost:%20a%0D%0A%0D%0AGET%20/version%20HTTP/1.1%0D%0Ax:%20y",
        "x%0D%0Ahost:%20a%0D%0A%0D%0AGET%20%0D%0A",
        "x%0A",
        "x%00",
    ],
)
async def test_a_path_is_forwarded_as_it_was_sent(under: str, name: str) -> None:
    """Whatever it encodes, the gateway gets one request, whose target has the bytes of the client's."""
    if under == "/v1/responses/" and ("/" in name or "%2F" in name):
        pytest.skip("what is below a response is a route of its own")
    async with routing({"a": [ScriptedGateway()]}) as harness:
        response = await harness.client.get(f"{under}{name}?q=%0d%0a")
        calls = harness.gateways["a"][0].calls

    assert response.status_code == 200
    assert [(call.method, call.target) for call in calls] == [("GET", f"{under}{name}?q=%0d%0a")]


@pytest.mark.parametrize(
    "target", [b"", b"x", b"/a b", b"/a\r\nx: y", b"/a\n", b"/a\tb", b"/a\x00", b"/a?b c", b"/\xc3\xbc", b"/\x7f"]
)
async def test_a_target_that_is_not_one_is_never_written(target: bytes) -> None:
    """The last line of defence: the bytes of a target have to be visible ASCII."""
    async with upstream_of(ScriptedGateway()) as upstream:
        with pytest.raises(InvalidRequest) as found:
            await get(upstream, target)

    assert found.value.code == "invalid_http"


@pytest.mark.parametrize(
    "header", [(b"x", b"a\r\nb: c"), (b"x", b"a\nb"), (b"x", b"a\x00"), (b"x y", b"a"), (b"", b"a"), (b"x\r\ny", b"a")]
)
async def test_a_header_that_would_end_early_is_never_written(header: tuple[bytes, bytes]) -> None:
    """Names are tokens, and values have no control characters besides the tab."""
    async with upstream_of(ScriptedGateway()) as upstream:
        with pytest.raises(InvalidRequest):
            await upstream.send("GET", b"/x", [header])
        with pytest.raises(InvalidRequest):
            await upstream.send("GET /y", b"/x", ())
        exchange = await upstream.send("GET", b"/x", [(b"x", b"tab\there \xff")])
        exchange.close()


async def test_an_answer_too_many_ends_the_connection() -> None:
    """What follows an answer in one packet is part of no exchange: the next request gets its own answer."""

    async def script(call: Call) -> None:
        body = call.target.encode()
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s%s" % (len(body), body, SECOND))

    gateway = ScriptedGateway(script)
    async with upstream_of(gateway) as upstream:
        found = [await get(upstream, target) for target in (b"/one", b"/two", b"/three")]
        await until(lambda: gateway.gone == 3)

    assert found == [b"/one", b"/two", b"/three"]


async def test_bytes_while_a_connection_is_idle_end_it() -> None:
    """An answer that no request asked for is not the next client's, whenever it comes."""
    gateway = ScriptedGateway()
    async with upstream_of(gateway) as upstream:
        first = await get(upstream)
        await gateway.calls[0].write(SECOND)
        await until(lambda: gateway.gone == 1)
        second = await get(upstream)

    assert first == second == b'{"ok": true}'


async def test_a_stray_answer_does_not_reach_another_client() -> None:
    """The same through a router: the second client gets the answer to its own request."""

    async def script(call: Call) -> None:
        asked = json.loads(call.body)["prompt"]
        await call.answer(200, json.dumps({"asked": asked}).encode())

    gateway = ScriptedGateway(script)
    async with routing({"a": [gateway]}) as harness:
        first = await harness.client.post("/v1/completions", json={"prompt": "one"})
        await gateway.calls[0].write(SECOND)
        await until(lambda: gateway.gone == 1)
        second = await harness.client.post("/v1/completions", json={"prompt": "two"})

    assert (first.json(), second.json()) == ({"asked": "one"}, {"asked": "two"})


async def test_a_long_answer_that_is_left_unread_does_not_stop_the_next() -> None:
    """A connection whose reading was paused by a body that came whole reads again for the next exchange."""

    async def long(call: Call) -> None:
        await call.answer(200, b"x" * (2**18 + 2**16))

    gateway = ScriptedGateway(long)
    async with upstream_of(gateway) as upstream:
        exchange = await upstream.send("GET", b"/x", ())
        await until(lambda: exchange._connection._is_paused)
        exchange.close()
        gateway.script = answers
        async with asyncio.timeout(10):
            assert await get(upstream) == b'{"ok": true}'
