"""HTTPS at the gateway: what is spoken, and that a replaced certificate is taken without a restart."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from services.gateway.config import GatewayConfig
from services.gateway.connections import Connections
from services.gateway.http_server import bind, make_server
from services.gateway.tls import ServerTls
from shared.errors import ConfigError
from tests.certificates import Authority
from tests.waiting import until


class Files:
    """A certificate and its key under names that stay, and an authority that issues others."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.put(*self.authority.issue("gateway"))

    def put(self, certificate: Path, key: Path) -> None:
        shutil.copyfile(certificate, self.certificate)
        shutil.copyfile(key, self.key)

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority.ca))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(tls: ServerTls) -> AsyncIterator[int]:
    """A gateway's server on a free port."""
    sock = bind("127.0.0.1", 0)
    server = make_server(hello, Connections(16, 10.0), tls)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await until(lambda: server.started)
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        sock.close()


async def ask(port: int, context: ssl.SSLContext | None) -> tuple[bytes, int]:
    """The answer to a request, and the serial number of the certificate (0 without TLS)."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="gateway" if context else None
    )
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        shown = writer.get_extra_info("peercert")
        return answer, int(shown["serialNumber"], 16) if shown else 0
    finally:
        writer.close()


async def test_https_is_spoken_and_nothing_else(files: Files) -> None:
    """A client that trusts the authority is answered; one that speaks plain HTTP is not."""
    async with serving(ServerTls(files.certificate, files.key, "1.2")) as port:
        answer, _ = await ask(port, files.client())
        try:
            plain, _ = await ask(port, None)
        except OSError:
            plain = b""

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"hello")
    assert b"hello" not in plain


async def test_older_versions_than_the_minimum_are_refused(files: Files) -> None:
    """A client that knows 1.2 alone gets in with a minimum of 1.2 and not with 1.3."""
    old = files.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(ServerTls(files.certificate, files.key, "1.2")) as port:
        answer, _ = await ask(port, old)
    async with serving(ServerTls(files.certificate, files.key, "1.3")) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(port, old)

    assert answer.endswith(b"hello")


async def test_a_replaced_certificate_is_shown_from_the_next_connection_on(files: Files) -> None:
    """Without a restart, and with a word in the log."""
    tls = ServerTls(files.certificate, files.key, "1.2")
    async with serving(tls) as port:
        _, first = await ask(port, files.client())
        files.put(*files.authority.issue("gateway"))
        with capture_logs() as logged:
            tls.refresh()
            tls.refresh()
        _, second = await ask(port, files.client())

    assert first != second
    assert [entry["event"] for entry in logged] == ["certificate_replaced"]


async def test_files_that_do_not_fit_together_leave_the_old_pair_in_use(files: Files) -> None:
    """While only the certificate is new, or one is broken or gone, the old one serves; then the new pair does."""
    tls = ServerTls(files.certificate, files.key, "1.2")
    certificate, key = files.authority.issue("other")
    async with serving(tls) as port:
        _, first = await ask(port, files.client())
        with capture_logs() as logged:
            shutil.copyfile(certificate, files.certificate)
            tls.refresh()
            tls.refresh()
            _, half = await ask(port, files.client())
            files.key.unlink()
            tls.refresh()
            _, gone = await ask(port, files.client())
            shutil.copyfile(key, files.key)
            tls.refresh()
        context = files.client()
        context.check_hostname = False
        _, whole = await ask(port, context)

    assert first == half == gone != whole
    events = [entry["event"] for entry in logged]
    assert events == ["certificate_not_used", "certificate_not_used", "certificate_replaced"]


def test_files_that_cannot_be_used_are_refused_at_the_start(files: Files, tmp_path: Path) -> None:
    """Missing, broken, or of another key: the message names the flags."""
    _, other = files.authority.issue("other")
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")

    for certificate, key in ((tmp_path / "none", files.key), (broken, files.key), (files.certificate, other)):
        with pytest.raises(ConfigError, match=r"--tls-cert .* and --tls-key"):
            ServerTls(certificate, key, "1.2")


def test_a_certificate_needs_its_key() -> None:
    """One without the other is a fault of the settings."""
    with pytest.raises(ValueError, match="--tls-cert and --tls-key need each other"):
        GatewayConfig(model="m", tls_cert="tls.crt")
