"""Telling whether a broker answers, and which one."""

import asyncio

import pytest

from shared.errors import ConfigError
from thermocline.supervisor.nats_server import require_external, server_info_at, wait_until_up


class Speaker:
    """A TCP server that greets every client with one line."""

    def __init__(self, line: bytes) -> None:
        self._line = line

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._line)
        await writer.drain()
        writer.close()


async def test_a_server_introduces_itself() -> None:
    """The first line of a server is read as JSON."""
    async with Speaker(b'INFO {"server_name": "cell-1", "jetstream": true}\r\n') as port:
        assert await server_info_at("127.0.0.1", port) == {"server_name": "cell-1", "jetstream": True}
        await wait_until_up("cell-1", "127.0.0.1", port, timeout_s=60.0)


async def test_somebody_else_on_the_port_is_told() -> None:
    """A server of another name took the port."""
    async with Speaker(b'INFO {"server_name": "other"}\r\n') as port:
        with pytest.raises(ConfigError, match="another NATS server took"):
            await wait_until_up("cell-1", "127.0.0.1", port, timeout_s=60.0)


@pytest.mark.parametrize("line", [b"SSH-2.0-x\r\n", b"INFO {broken\r\n", b""])
async def test_other_programs_are_no_broker(line: bytes) -> None:
    """Whatever does not speak the protocol does not count."""
    async with Speaker(line) as port:
        assert await server_info_at("127.0.0.1", port) is None


async def test_an_external_broker_must_have_jetstream() -> None:
    """The input stream needs it, so its lack is told at once."""
    async with Speaker(b'INFO {"server_name": "b", "jetstream": false}\r\n') as port:
        with pytest.raises(ConfigError, match="without JetStream"):
            await require_external((f"nats://127.0.0.1:{port}",))


async def test_one_answering_url_is_enough() -> None:
    """A cluster may have a node down; with none left the message names all."""
    async with Speaker(b'INFO {"server_name": "b", "jetstream": true}\r\n') as port:
        await require_external(("nats://127.0.0.1:9", f"nats://127.0.0.1:{port}"))

    with pytest.raises(ConfigError, match=r"no NATS server answers at nats://127\.0\.0\.1:9$"):
        await require_external(("nats://me:secret@127.0.0.1:9",))
