"""HTTP over real sockets, with servers that write whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.unit.thermocline.load.virtual_time import VirtualTime
from thermocline.client import RequestError
from thermocline.load.http_client import HttpClient, Response
from thermocline.supervisor.ports import free_port

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
CLOSING = b"HTTP/1.1 200 OK\r\n\r\nhello"


Writes = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """What a server saw, and a client of it."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.connections = 0
        self.requests: list[bytes] = []

    async def post(self, body: bytes = b"{}") -> tuple[Response, bytes]:
        """The response, and what was handed on piece by piece."""
        pieces: list[bytes] = []
        response = await self.client.send("POST", "/v1/x", body, lambda data, now_s: pieces.append(data))
        return response, b"".join(pieces)


@asynccontextmanager
async def peer_that(answer: Writes, path: str = "", tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """``answer`` writes what comes after each request; the server hangs up when it has closed the writer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"Content-Length: (\d+)", head)
                assert found is not None
                peer.requests.append(head + await reader.readexactly(int(found[1])))
                await answer(writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # The client has gone, or the test: Python 3.11 logs a server's task that ends as cancelled.
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
    client = HttpClient(url, {"Authorization": "Bearer key"}, VirtualTime(), connect_timeout_s=20.0)
    peer = Peer(client)
    try:
        yield peer
    finally:
        client.close()
        server.close()


def writes(data: bytes, *, closes: bool = False, by_byte: bool = False) -> Writes:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in [bytes([one]) for one in data] if by_byte else [data]:
            writer.write(piece)
            await writer.drain()
        if closes:
            writer.close()

    return answer


@pytest.mark.parametrize("by_byte", [False, True])
@pytest.mark.parametrize(("data", "closes"), [(SIZED, False), (CHUNKED, False), (CLOSING, True), (LAST, True)])
async def test_a_body_is_read_whichever_way_it_ends(data: bytes, closes: bool, by_byte: bool) -> None:
    """By its length, by its last chunk, or with the connection; again and again."""
    async with peer_that(writes(data, closes=closes, by_byte=by_byte)) as peer:
        for _ in range(3):
            response, body = await peer.post()
            assert (response.status, body) == (200, b"hello")


async def test_connections_are_used_again() -> None:
    """One after another over one; at once over several."""
    async with peer_that(writes(CHUNKED)) as peer:
        for _ in range(5):
            await peer.post()
        assert peer.connections == 1

        await asyncio.gather(*(peer.post() for _ in range(4)))
        assert peer.connections == 4


async def test_a_request_says_what_a_server_needs() -> None:
    """Path below that of the base URL, host, key and body."""
    async with peer_that(writes(SIZED), path="/under/") as peer:
        await peer.post(b'{"a":1}')

    head, _, body = peer.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /under/v1/x HTTP/1.1"
    assert lines[1].startswith("Host: 127.0.0.1:")
    assert "Authorization: Bearer key" in lines
    assert body == b'{"a":1}'


async def test_an_error_is_read_whole_and_with_its_headers() -> None:
    """Nothing of it is handed on as an answer."""
    data = b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\nno"
    async with peer_that(writes(data)) as peer:
        response, pieces = await peer.post()

    assert (response.status, response.body, pieces) == (503, b"no", b"")
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "connection_broken"),
        (b"SSH-2.0-server\r\n", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection_broken"),
    ],
)
async def test_what_is_no_response_is_an_error(data: bytes, code: str) -> None:
    """And the connection is not used again."""
    async with peer_that(writes(data, closes=True)) as peer:
        for number in (1, 2):
            with pytest.raises(RequestError) as caught:
                await peer.post()
            assert caught.value.code == code
            assert peer.connections == number


async def test_a_connection_that_is_reset_is_an_error() -> None:
    """In the middle of a body."""

    async def reset(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhel")
        await writer.drain()
        # With this, closing sends a reset and not an end.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.close()

    async with peer_that(reset) as peer:
        with pytest.raises(RequestError, match="connection_broken"):
            await peer.post()


async def test_nobody_there_is_refused() -> None:
    """At once."""
    client = HttpClient(f"http://127.0.0.1:{free_port()}", {}, VirtualTime(), connect_timeout_s=20.0)

    with pytest.raises(RequestError, match="connection_refused"):
        await client.send("GET", "/", b"", None)


async def test_who_gives_up_leaves_a_connection_that_nobody_uses() -> None:
    """Or the next answer would be the one before."""
    is_asked = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        if not is_asked.is_set():
            is_asked.set()
            await asyncio.Event().wait()
        writer.write(SIZED)

    async with peer_that(answer) as peer:
        asking = asyncio.create_task(peer.post())
        await is_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

        assert (await peer.post())[1] == b"hello"
        assert peer.connections == 2


async def test_a_reader_that_refuses_ends_the_exchange() -> None:
    """Though all of the response has come."""

    def refuse(data: bytes, now_s: float) -> None:
        raise RequestError("bad_stream", "x")

    async with peer_that(writes(SIZED)) as peer:
        with pytest.raises(RequestError, match="bad_stream"):
            await peer.client.send("POST", "/", b"", refuse)
        assert (await peer.post())[1] == b"hello"
        assert peer.connections == 2


async def test_an_endless_error_is_not_kept() -> None:
    """Beyond a bound."""
    data = b"HTTP/1.1 500 No\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 17 * 2**20
    async with peer_that(writes(data)) as peer:
        with pytest.raises(RequestError, match="bad_response"):
            await peer.post()


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_a_server_with_tls_is_trusted_by_its_certificate(
    is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody vouches for is not talked to."""
    authority = Authority(tmp_path)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(*authority.issue("server"))
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))

    async with peer_that(writes(CHUNKED), tls=served) as peer:
        if is_trusted:
            assert (await peer.post())[1] == b"hello"
            return
        with pytest.raises(RequestError, match=r"tls_failed.*certificate"):
            await peer.post()
        assert peer.requests == []
