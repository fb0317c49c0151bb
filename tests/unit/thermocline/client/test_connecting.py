"""Which requests go through the proxy that the environment names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from shared.loopback import is_loopback
from thermocline.client import connect

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[tuple[int, list[str]]]:
    """A server that answers everything: its port, and the first line of each request."""
    lines: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode())
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], lines


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
async def test_a_gateway_of_this_machine_is_asked_directly(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever proxy the environment names, no request for a loopback address reaches it."""
    async with listening() as (port, heard), listening() as (proxy_port, asked):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy_port}")
        for host in ("127.0.0.1", "localhost"):
            async with connect(f"http://{host}:{port}/base") as client:
                response = await client.get("/path")

            assert response.status_code == httpx.codes.OK
    assert heard == ["GET /base/path HTTP/1.1"] * 2
    assert asked == []


async def test_a_gateway_elsewhere_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is told the whole address."""
    async with listening() as (proxy_port, asked):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy_port}")
        async with connect("http://gateway.example:8000") as client:
            await client.get("/path")

    assert asked == ["GET http://gateway.example:8000/path HTTP/1.1"]


def test_addresses_of_this_machine_are_known() -> None:
    """By name and by address; a name that only looks like one is not."""
    assert all(is_loopback(host) for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "gateway", "localhost.example", "0.0.0.0", ""))
