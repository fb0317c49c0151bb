"""Names under which a server on loopback answers."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from services.gateway.host_names import only_own_names

APP = Response(b"whole")


async def status_of(name: str, listens_on: str = "127.0.0.1", origins: tuple[str, ...] = ()) -> int:
    transport = httpx.ASGITransport(app=only_own_names(APP, listens_on, origins))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/models", headers={"host": name})
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == "unknown_host"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code


@pytest.mark.parametrize(
    "name",
    ["localhost", "localhost:8000", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7",
     "cell.localhost", "host.docker.internal:8000", "box.local", socket.gethostname(), "", "gateway:8000"],
)  # fmt: skip
async def test_names_of_this_machine_are_answered(name: str) -> None:
    """Addresses too, also through a forwarded port: a page cannot have one of them resolve elsewhere."""
    assert await status_of(name) == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "evil.localhost.example", "127.0.0.1.evil.example",
     "127.0.0.1:8000.evil.example", "[evil.example]"],
)  # fmt: skip
async def test_a_page_that_has_its_name_resolve_here_is_refused(name: str) -> None:
    """With 421, in OpenAI's shape."""
    assert await status_of(name) == 421


async def test_a_server_of_a_network_answers_to_all_names() -> None:
    """It is reached under names that it does not know."""
    assert await status_of("api.example", "0.0.0.0") == 200
    assert await status_of("api.example", "10.0.0.7") == 200


async def test_names_of_allowed_origins_are_answered() -> None:
    """As behind a proxy on the same machine, which passes on its public name."""
    assert await status_of("api.example", origins=("https://api.example",)) == 200
    assert await status_of("other.example", origins=("https://api.example",)) == 421
    assert await status_of("other.example", origins=("*",)) == 200


async def test_a_request_without_a_name_is_answered() -> None:
    """Of HTTP/1.0; browsers always send one."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    app = only_own_names(APP, "127.0.0.1")
    await app({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)

    assert sent[0]["status"] == 200
