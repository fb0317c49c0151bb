"""The proxy between a process and the broker, with an echo in the broker's place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from thermocline.chaos.proxy import Proxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing_proxy() -> AsyncIterator[Proxy]:
    """A proxy to a server that says everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1024):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # The test resets connections.
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy("p", server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def connected(proxy: Proxy) -> Connection:
    """A connection through the proxy that was used once, so that all of it stands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await said_back(reader, writer, b"hello") == b"hello"
    return reader, writer


async def said_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """What comes back for ``data``."""
    writer.write(data)
    async with asyncio.timeout(10):
        return await reader.readexactly(len(data))


async def is_reset(reader: asyncio.StreamReader) -> bool:
    """Whether the connection is broken off."""
    async with asyncio.timeout(10):
        try:
            return await reader.read(1) == b""
        except OSError:
            return True


async def test_connections_that_end_with_it_are_no_failures() -> None:
    """Nothing is logged when it is closed in the middle of a conversation."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

    async with echoing_proxy() as proxy:
        reader, _ = await connected(proxy)
    assert await is_reset(reader)

    assert complaints == []


async def test_it_forwards_both_ways_unchanged() -> None:
    """Also what does not fit one read."""
    async with echoing_proxy() as proxy:
        data = bytes(range(256)) * 1024

        assert await said_back(*await connected(proxy), data) == data


@pytest.mark.parametrize("direction", ["to_broker", "from_broker"])
async def test_a_stalled_direction_keeps_everything_until_it_heals(direction: str) -> None:
    """Nothing is lost and nothing is out of order."""
    async with echoing_proxy() as proxy:
        reader, writer = await connected(proxy)
        proxy.stall(direction)  # type: ignore[arg-type]
        writer.write(b"held back")
        early = asyncio.create_task(reader.readexactly(9))

        # Another connection through a proxy that is not stalled has time for a whole round trip meanwhile.
        async with echoing_proxy() as other:
            await connected(other)
        assert not early.done()
        proxy.heal()

        async with asyncio.timeout(10):
            assert await early == b"held back"


async def test_a_connection_that_lost_bytes_is_cut_when_it_heals() -> None:
    """A protocol with a hole in it must never go on."""
    async with echoing_proxy() as proxy:
        reader, writer = await connected(proxy)
        proxy.swallow("to_broker")
        writer.write(b"gone")
        await writer.drain()
        proxy.heal()

        assert await is_reset(reader)
        assert await said_back(*await connected(proxy), b"again") == b"again"


async def test_a_cut_breaks_what_is_there_and_allows_what_comes() -> None:
    """As a router that restarts."""
    async with echoing_proxy() as proxy:
        reader, _ = await connected(proxy)
        proxy.cut()

        assert await is_reset(reader)
        await connected(proxy)


async def test_refused_connections_are_reset_at_once() -> None:
    """Until it heals."""
    async with echoing_proxy() as proxy:
        proxy.is_refusing = True
        reader, _ = await asyncio.open_connection("127.0.0.1", proxy.port)

        assert await is_reset(reader)

        proxy.heal()
        await connected(proxy)


async def test_a_broker_that_is_away_resets_the_process_s_connection() -> None:
    """It must learn that nobody is there."""
    proxy = Proxy("p", 1)
    await proxy.start()
    try:
        reader, _ = await asyncio.open_connection("127.0.0.1", proxy.port)

        assert await is_reset(reader)
    finally:
        await proxy.close()
