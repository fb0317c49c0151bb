"""Settings of a router, and how it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from services.gateway.router.__main__ import main
from services.gateway.router.bootstrap import compose, run
from services.gateway.router.config import RouterConfig
from services.gateway.router.health import ask
from services.gateway.router.views import cells_view, health_view
from shared.config import from_command_line
from shared.errors import ConfigError
from shared.lifecycle import EXIT_REFUSED, Lifecycle
from shared.messages.cells import CellLoad
from tests.unit.gateway.router.scripted_gateway import ScriptedGateway
from thermocline.supervisor.ports import free_port


def read(*argv: str) -> RouterConfig:
    return from_command_line(RouterConfig, "router", argv, environ={})


def test_cells_are_read_with_their_gateways() -> None:
    """Names to URLs, several of one cell apart by a bar."""
    config = read("--cells", "lisbon=http://a:1|http://b:2, porto=https://c")

    assert config.urls == {"lisbon": ("http://a:1", "http://b:2"), "porto": ("https://c",)}


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--cells", ""],
        ["--cells", "http://a:1"],
        ["--cells", "lisbon="],
        ["--cells", "a.b=http://a:1"],
        ["--cells", "a=ftp://a:1"],
        ["--cells", "a=http://a:1/v1"],
        ["--cells", "a=http://user:secret@a:1"],
        ["--cells", "a=http://a:99999"],
        ["--cells", "a=http://a:1,a=http://b:1"],
        ["--cells", "a=http://a:1", "--admin-key", "short"],
        ["--cells", "a=http://a:1", "--tls-cert", "x"],
        ["--cells", "a=http://a:1", "--api-metrics", "admin"],
        ["--cells", "a=http://a:1", "--tries", "0"],
    ],
)
def test_wrong_settings_are_refused(argv: list[str]) -> None:
    """With exit code 2, and no word of a secret."""
    with pytest.raises(ConfigError) as error:
        read(*argv)

    assert "secret" not in error.value.message
    assert main(argv) == EXIT_REFUSED


def test_authorities_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Only where a gateway speaks HTTPS are they looked at."""
    missing = str(tmp_path / "no.pem")

    with pytest.raises(ConfigError, match="cell-ca"):
        compose(read("--cells", "a=https://a", "--cell-ca", missing))


async def test_a_router_starts_without_a_broker_and_without_cells() -> None:
    """It says that it is not ready, and it ends when it is told to.

    On loopback it answers only to its own names: cells may ask for no keys, and a page may have its name resolve here.
    """
    port, life = free_port(), Lifecycle()
    gateway = ScriptedGateway()
    config = RouterConfig(
        cells=(f"a={gateway.url}",),
        port=port,
        nats=(f"nats://127.0.0.1:{free_port()}",),
        log_level="error",
        health_ms=10,
    )
    running = asyncio.create_task(run(config, life))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client, asyncio.timeout(30):
        while not await _answers(client, 503):
            await asyncio.sleep(0.01)
        await gateway.start()
        while not await _answers(client, 200):
            await asyncio.sleep(0.01)
        foreign = await client.get("/v1/models", headers={"host": "evil.example"})
    await gateway.stop()
    life.stop()
    await running

    assert (foreign.status_code, foreign.json()["error"]["code"]) == (421, "unknown_host")
    assert not gateway.calls
    assert life.exit_code == 0


async def _answers(client: httpx.AsyncClient, status: int) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == status
    except httpx.HTTPError:
        return False  # It does not listen yet.


async def test_why_a_gateway_is_away_is_told() -> None:
    """One that speaks no TLS, one that is not there, and one that is not ready; the fourth is well."""
    gateways = [ScriptedGateway(), ScriptedGateway(is_ready=False), ScriptedGateway()]
    for gateway in gateways:
        await gateway.start()
    absent, unready, well = [gateway.url for gateway in gateways]
    await gateways[0].stop()
    server = await asyncio.start_server(_speaks_no_tls, "127.0.0.1", 0)
    urls = (
        f"plain=https://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        f"absent={absent}",
        f"unready={unready}",
        f"well={well}",
    )
    router = compose(RouterConfig(cells=urls))
    for cell, (upstream,) in router.gateways.items():
        await ask(router, cell, upstream)
        upstream.close()
    for gateway in gateways:
        await gateway.stop()
    server.close()
    found = {cell.name: cell.gateways[0].error for cell in cells_view(router).data}

    assert "SSL" in found["plain"]
    assert "no connection" in found["absent"]
    assert "503" in found["unready"]
    assert found["well"] == ""
    assert (health_view(router).status, health_view(router).cells_open) == ("degraded", 1)


async def test_a_cell_with_another_model_makes_the_router_degraded() -> None:
    """Both cells answer; who has the admin key reads which one gets no requests, and why."""
    router = compose(RouterConfig(cells=("a=http://127.0.0.1:1", "b=http://127.0.0.1:2")))
    for name in ("a", "b"):
        load = CellLoad(cell=name, gateway="g", incarnation="1", models=("m",), fingerprint=name)
        router.cells.hear_load(load, router.clock())
    found = {cell.name: cell.error for cell in cells_view(router).data}

    assert (health_view(router).status, health_view(router).cells_open) == ("degraded", 1)
    assert found["a"] == ""
    assert found["b"].startswith("its m has another configuration, tokenizer, template or weights")


async def _speaks_no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
    writer.close()
