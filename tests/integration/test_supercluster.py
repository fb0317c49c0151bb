"""Three cells, each the leaf of a hub of its own; the hubs are a supercluster of NATS. A router at one hub hears all
cells, and goes on when one is away with its hub.

Brokers of cells cannot be the supercluster themselves: one that has JetStream and gateways of NATS does not start
without a cluster, and then all cells would share one JetStream's quorum.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from services.gateway.held_heads import pack_heads
from services.gateway.prompt_heads import asked_of
from services.gateway.router import bootstrap
from services.gateway.router.config import RouterConfig
from services.gateway.router.relay import CELL_HEADER
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, Delivery
from shared.codec import encode
from shared.lifecycle import Lifecycle
from shared.messages.cells import CellHeads, CellLoad
from tests.nats_server import NatsServer
from tests.several_cells import ADMIN_KEY, cells_of, hub_config, leaf_config
from tests.unit.gateway.router.scripted_gateway import ScriptedGateway, chat_body
from thermocline.supervisor.ports import free_port

pytestmark = pytest.mark.integration

NAMES = ("lisbon", "porto", "faro")
BODY = chat_body("a shared document " * 200)


def gateway_of(name: str, ports: dict[str, int]) -> str:
    """What joins a hub to the others. A name that a leaf has, too, would shut the leaf out."""
    others = ", ".join(f'{{name: "site-{each}", url: "nats://127.0.0.1:{port}"}}' for each, port in ports.items())
    gateway = f'gateway {{ name: "site-{name}", listen: "127.0.0.1:{ports[name]}", gateways: [{others}] }}'
    return f"{gateway}\nsystem_account: SYS\n"


@dataclass
class Site:
    """Where a cell is: its hub and its broker."""

    hub: NatsServer
    broker: NatsServer

    def kill(self) -> None:
        self.hub.kill()
        self.broker.kill()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[dict[str, Site]]:
    """One for each cell; hubs are joined by gateways of NATS."""
    ports = {name: free_port() for name in NAMES}
    made: dict[str, Site] = {}
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            leaf_port = free_port()
            config = gateway_of(name, ports) + hub_config(NAMES, leaf_port)
            hub = NatsServer(tmp_path / f"hub-{name}", name=f"hub-{name}", config=config, has_jetstream=False)
            broker = NatsServer(tmp_path / name, name=name, config=leaf_config(name, leaf_port))
            made[name] = Site(stack.enter_context(hub), stack.enter_context(broker))
        yield made


async def tell(bus: Bus, cell: str) -> None:
    """What a gateway of the cell tells once a second; faro holds the document."""
    digests = asked_of(msgspec.json.encode(BODY)).head.digests if cell == "faro" else ()
    heads = CellHeads(cell=cell, gateway="g", incarnation="one", number=0, added=pack_heads(digests), is_first=True)
    load = CellLoad(cell=cell, gateway="g", incarnation="one", models=("m",), workers=1, heads_number=0)
    await bus.publish(subjects.cell_heads(cell, "g"), encode(heads))
    await bus.publish(subjects.cell_load(cell, "g"), encode(load))


@contextlib.asynccontextmanager
async def routing(gateways: dict[str, ScriptedGateway], hub: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    """A router as its process makes it, at this hub."""
    port, life = free_port(), Lifecycle()
    config = RouterConfig(
        cells=tuple(f"{name}={gateway.url}" for name, gateway in gateways.items()),
        nats=(f"nats://router:router@127.0.0.1:{hub.port}",),
        port=port,
        admin_key=ADMIN_KEY,
        log_level="error",
        health_ms=20,
        # A gateway that is gone refuses at once; one of a busy machine may be slow.
        health_timeout_ms=60_000,
        connect_timeout_ms=60_000,
        grace_ms=100,
    )
    serving = asyncio.create_task(bootstrap.run(config, life))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
            yield client
    finally:
        life.stop()
        await serving


async def test_a_router_hears_all_cells_of_a_supercluster(sites: dict[str, Site]) -> None:
    """It sends a document to the cell that told it; when that cell and its hub are gone, another answers."""
    gateways = {name: ScriptedGateway() for name in NAMES}
    for gateway in gateways.values():
        await gateway.start()
    buses = {name: await connect((site.broker.url,), "test") for name, site in sites.items()}
    inputs: list[str] = []

    async def hear(delivery: Delivery) -> None:
        inputs.append(delivery.subject)

    await buses["porto"].subscribe("tc.in.>", hear)
    async with routing(gateways, sites["lisbon"].hub) as client:
        while not await _have_told(client, buses):
            await asyncio.sleep(0.05)
        await buses["lisbon"].publish("tc.in.request.g", b"x")
        found = await client.post("/v1/chat/completions", json=BODY)
        await buses.pop("faro").close()
        sites["faro"].kill()
        await gateways["faro"].stop()
        fallen_back = await client.post("/v1/chat/completions", json=BODY)
        while (await client.get("/health/ready")).json()["status"] != "degraded":
            await asyncio.sleep(0.02)
    for bus in buses.values():
        await bus.close()
    for gateway in gateways.values():
        await gateway.stop()

    assert found.headers[CELL_HEADER.decode()] == "faro"
    assert fallen_back.status_code == httpx.codes.OK
    assert fallen_back.headers[CELL_HEADER.decode()] in ("lisbon", "porto")
    assert not inputs


async def _have_told(client: httpx.AsyncClient, buses: dict[str, Bus]) -> bool:
    """Tell it all once more, since brokers join while we do; whether the router has heard each cell."""
    for cell, bus in buses.items():
        await tell(bus, cell)
    try:
        cells = await cells_of(client)
    except httpx.HTTPError:
        return False  # It does not listen yet.
    return all(cell["models"] == ["m"] for cell in cells) and any(cell["heads"] for cell in cells)
