"""A gateway that answers as a script says, over a real socket, and a router in front of several of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.gateway.http_server import bind, make_server
from services.gateway.router.app import RouterApp
from services.gateway.router.bootstrap import compose
from services.gateway.router.config import RouterConfig
from services.gateway.router.parts import Router
from tests.waiting import until
from thermocline.supervisor.ports import free_port

ADMIN_KEY = "an-admin-key-of-tests"


@dataclass
class Call:
    """One request as the gateway got it. ``drop`` cuts its connection off."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def drop(self) -> None:
        self.writer.transport.abort()

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, *headers: str, content_type: str = "application/json") -> None:
        """A whole answer."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", f"content-length: {len(body)}", *headers]
        await self.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def begin_stream(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")


async def hangs(call: Call) -> None:
    """A script that says nothing until the router ends the connection."""
    await call.reader.read()
    raise ConnectionError


Script = Callable[[Call], Awaitable[None]]


async def answers(call: Call) -> None:
    """The plainest script."""
    await call.answer(200, b'{"ok": true}')


def refuses(status: int, code: str, retry_after: str = "") -> Script:
    """A script that answers with an error in OpenAI's shape."""

    async def script(call: Call) -> None:
        body = json.dumps({"error": {"code": code, "message": f"it is {code}"}}).encode()
        await call.answer(status, body, *([f"retry-after: {retry_after}"] if retry_after else []))

    return script


@dataclass
class ScriptedGateway:
    """``script`` answers posts; ``calls`` are those that came. Health is 200 while ``is_ready``, with ``health``.

    Its port stays its own after :meth:`stop`: nobody else takes it.
    """

    script: Script = answers
    is_ready: bool = True
    health: bytes = b"{}"
    calls: list[Call] = field(default_factory=list)
    gone: int = 0
    port: int = field(default_factory=free_port)
    _server: asyncio.Server | None = None
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """No connection is taken any more, and those that are open are cut off."""
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")[:-2]
                method, target, _ = first.split(" ")
                headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                call = Call(method, target, headers, body, reader, writer)
                if target == "/health/ready":
                    await call.answer(200 if self.is_ready else 503, self.health)
                    continue
                self.calls.append(call)
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone += 1
        finally:
            writer.close()


@dataclass
class Harness:
    """A router that listens, its gateways by cell, and a client of it."""

    router: Router
    gateways: dict[str, list[ScriptedGateway]]
    client: httpx.AsyncClient

    def calls(self) -> dict[str, int]:
        """Requests that each cell got."""
        return {cell: sum(len(each.calls) for each in gateways) for cell, gateways in self.gateways.items()}

    async def chat(self, text: str, **extra: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(text) | extra)


def chat_body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


@contextlib.asynccontextmanager
async def routing(cells: Mapping[str, Sequence[ScriptedGateway]], **settings: Any) -> AsyncIterator[Harness]:
    """A router without a broker in front of these gateways; they are asked for their health by tests alone.

    It is patient with them where ``settings`` do not say otherwise, as a busy machine needs it to be.
    """
    for gateways in cells.values():
        for gateway in gateways:
            await gateway.start()
    urls = tuple(f"{name}={'|'.join(each.url for each in gateways)}" for name, gateways in cells.items())
    patience = {"connect_timeout_ms": 20_000, "health_timeout_ms": 20_000}
    config = RouterConfig(cells=urls, summaries=False, admin_key=ADMIN_KEY, port=0, **(patience | settings))
    router = compose(config)
    sock = bind("127.0.0.1", 0)
    server = make_server(RouterApp(router), router.config.connections())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{sock.getsockname()[1]}",
        timeout=20,
        headers={"content-type": "application/json"},
        verify=False,
    )
    try:
        yield Harness(router, {name: list(each) for name, each in cells.items()}, client)
    finally:
        await client.aclose()
        server.should_exit = True
        await serving
        for gateways in cells.values():
            for gateway in gateways:
                await gateway.stop()
        for upstreams in router.gateways.values():
            for upstream in upstreams:
                upstream.close()
