"""Several cells on this machine, each with a broker of its own: leaf nodes of a hub that routers listen at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from services.gateway.router import bootstrap
from services.gateway.router.config import RouterConfig
from shared.lifecycle import Lifecycle
from tests.nats_server import NatsServer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.ports import free_port

READY_S = 120.0
ADMIN_KEY = "the-admin-key-of-routers"


def hub_config(names: Sequence[str], leaf_port: int) -> str:
    """The hub lets each cell say what is its own under ``tc.cells``, and routers hear it; nothing else passes."""
    users = [
        f'{{user: "{name}", password: "{name}", permissions: '
        f'{{publish: ["tc.cells.{name}.>"], subscribe: ["tc.cells.{name}.wanted"]}}}}'
        for name in names
    ]
    users.append(
        '{user: "router", password: "router", permissions: '
        '{publish: ["tc.cells.*.wanted"], subscribe: ["tc.cells.>", "_INBOX.>"]}}'
    )
    leafnodes = f'leafnodes {{ listen: "127.0.0.1:{leaf_port}" }}'
    return f"{leafnodes}\naccounts {{ SYS: {{}}, CELLS {{ users: [{', '.join(users)}] }} }}\n"


def leaf_config(name: str, leaf_port: int) -> str:
    """What a cell's broker needs to be a leaf of the hub."""
    return f'leafnodes {{ remotes: [{{ url: "nats://{name}:{name}@127.0.0.1:{leaf_port}" }}] }}'


@dataclass
class SeveralCells:
    """Cells by name, each of processes of its own."""

    hub: NatsServer
    cells: dict[str, RunningCell] = field(default_factory=dict)

    @property
    def router_nats(self) -> str:
        return f"nats://router:router@127.0.0.1:{self.hub.port}"

    @asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        """A router in front of all cells that has heard of each; yields a client of it."""
        port = free_port()
        urls = tuple(f"{name}={cell.base_url}" for name, cell in self.cells.items())
        config = RouterConfig(
            cells=urls,
            nats=(self.router_nats,),
            port=port,
            admin_key=ADMIN_KEY,
            log_level="warning",
            grace_ms=500,
            **settings,
        )
        life = Lifecycle()
        running = asyncio.create_task(bootstrap.run(config, life))
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, verify=False)
        try:
            async with asyncio.timeout(READY_S):
                while not await self._is_heard(client, running):
                    await asyncio.sleep(0.05)
            yield client
        finally:
            await client.aclose()
            life.stop()
            await running

    async def _is_heard(self, client: httpx.AsyncClient, running: asyncio.Task[None]) -> bool:
        if running.done():
            running.result()
        try:
            return all(cell["summary_age_s"] is not None for cell in await cells_of(client))
        except httpx.HTTPError:
            return False


async def cells_of(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What a router says of its cells."""
    response = await client.get("/v1/cells", headers={"x-admin-key": ADMIN_KEY})
    found: list[dict[str, Any]] = response.raise_for_status().json()["data"]
    return found


@contextmanager
def several_cells(folder: Path, names: Sequence[str], settings: SupervisorConfig) -> Iterator[SeveralCells]:
    """Cells with these settings, ready. Call it from a thread that outlives the block, as ``running`` wants it."""
    leaf_port = free_port()
    found = SeveralCells(NatsServer(folder / "hub", name="hub", config=hub_config(names, leaf_port)))
    with ExitStack() as stack:
        stack.enter_context(found.hub)
        for name in names:
            broker = stack.enter_context(NatsServer(folder / name, name=name, config=leaf_config(name, leaf_port)))
            own = msgspec.structs.replace(settings, nats=(broker.url,), port=0)
            found.cells[name] = stack.enter_context(running(own, environ={"THERMOCLINE_CELL": name}, ready=False))
        for cell in found.cells.values():
            cell.wait_ready()
        yield found
