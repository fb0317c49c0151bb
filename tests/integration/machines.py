"""Nodes of one cell as real processes on this machine: each has a storage and a worker, and segments of its own.

With ``networks`` each node has a network and a /dev/shm of its own, too.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.node_networks import DEVICE, NodeNetworks
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.memory import unlink_all
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.status import CellStatus, GetInventory, Heartbeat, Inventory, Kind
from tests.cell import UNHURRIED
from tests.idle import settled, status_from
from tests.run_name import RUN
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.ports import free_port

READY_S = 240.0
DOCUMENT_TOKENS = 256
PAGE_SIZE = 16


class Node:
    """The processes that one machine has: a storage with its disk, and a worker."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.disk = folder / name
        self.disk.mkdir()
        self.shm_prefix = f"{RUN}-{name}-{secrets.token_hex(4)}"
        self.processes: dict[str, Process] = {}

    def __getitem__(self, kind: str) -> Process:
        return self.processes[kind]

    @property
    def leftovers(self) -> list[str]:
        return [path.name for path in Path(SHM_DIRECTORY).iterdir() if path.name.startswith(self.shm_prefix)]


class Machines:
    """A cell whose processes are started one by one. The scheduler and the gateway are on neither of the nodes."""

    def __init__(
        self,
        urls: tuple[str, ...],
        model: Path,
        bus: Bus,
        folder: Path,
        storage: dict[str, Any],
        *,
        has_disks: bool,
        names: tuple[str, ...] = ("a", "b"),
        networks: NodeNetworks | None = None,
    ) -> None:
        """``storage`` are further settings of each storage."""
        self.urls, self.model, self.bus = urls, model, bus
        self.port = free_port()
        self._folder = folder
        self._storage = storage
        self._has_disks = has_disks
        self._all: list[Process] = []
        self.nodes = {name: Node(name, folder) for name in names}
        self._networks = networks

    async def start(self, module: str, name: str, on: Node | None = None, **settings: Any) -> Process:
        """Start a process, on a node or on none."""
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        common = ["--nats", ",".join(self.urls), "--log-level", "info"]
        place: list[str] = []
        # Without it UCX also offers devices that other tests make and take away.
        environment = dict(os.environ) | {"UCX_NET_DEVICES": "lo"}
        if self._networks is not None and on is not None:
            place = self._networks.command(on.name)
            environment |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
        with (self._folder / f"{name}-{len(self._all)}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*place, sys.executable, "-m", f"services.{module}", *common, *flags),
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._all.append(process)
        return process

    async def start_centre(self, **scheduler: Any) -> None:
        """Scheduler and gateway. KV always comes back from disks: by speed, one on busy cores may lose to computing."""
        fixed = {"host_writes": "through", "prefetch_wait": "full", "restoring": "kv"}
        await self.start("scheduler", "scheduler", **fixed | UNHURRIED | scheduler)
        await self.start("gateway", "gateway", model=self.model, port=self.port)

    async def start_storage(self, node: Node) -> None:
        node.processes["storage"] = await self.start(
            "storage",
            f"storage-{node.name}",
            node,
            id=f"storage-{node.name}",
            node=node.name,
            shm_prefix=node.shm_prefix,
            host_kv_bytes="16MiB",
            hidden_bytes=0,
            **({"disk_dir": node.disk, "disk_kv_bytes": "64MiB"} if self._has_disks else {}),
            **self._storage,
        )

    async def start_worker(self, node: Node) -> None:
        node.processes["worker"] = await self.start(
            "worker",
            f"worker-{node.name}",
            node,
            id=f"worker-{node.name}",
            node=node.name,
            shm_prefix=node.shm_prefix,
            model=self.model,
            dtype="float32",
            threads=1,
            page_size=PAGE_SIZE,
            device_kv_bytes=4_000_000,
        )

    async def status(self) -> CellStatus:
        return await status_from(self.bus)

    async def until(self, claim: Callable[[CellStatus], bool]) -> CellStatus:
        """Wait until the scheduler's status is so."""
        async with asyncio.timeout(READY_S):
            while not claim(status := await self.status()):
                await asyncio.sleep(0.05)
        return status

    async def ready(self, workers: int) -> None:
        """Wait until so many workers with pools and storages are there, and the gateway answers."""
        await self.until(lambda cell: len(cell.workers) == workers and len(host_pools(cell)) == workers)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            async with asyncio.timeout(READY_S):
                while not await _is_ready(http):
                    await asyncio.sleep(0.05)

    async def settle(self, workers: int) -> CellStatus:
        return await settled(self.status, workers=workers)

    async def give_up(self, kind: Kind, member: str) -> None:
        """Have the scheduler know that a process has ended, as by a storage that sees it: none tells by its silence."""
        async with asyncio.timeout(READY_S):
            while incarnation := _incarnations(await self.status()).get(member):
                word = Heartbeat(kind=kind, id=member, incarnation=incarnation, is_gone=True)
                await self.bus.publish(subjects.heartbeat("storage", "test"), encode(word))
                await asyncio.sleep(0.05)

    async def uploaded(self, node: Node) -> None:
        """Wait until all that the storage has saved is in the object store."""
        subject = subjects.rpc("storage", "inventory", f"storage-{node.name}")
        async with asyncio.timeout(READY_S):
            while True:
                told = await self.bus.call(subject, encode(GetInventory()), timeout_s=READY_S)
                counters = decode(told, Inventory).counters
                moving = sum(count for name, count in counters.items() if name.endswith("_outstanding"))
                if not moving and counters["chunks_uploaded"] >= DOCUMENT_TOKENS // 64:
                    return
                await asyncio.sleep(0.05)

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=64)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=120, limits=limits, trust_env=False)

    async def ask(self, *bodies: dict[str, Any]) -> list[Answer]:
        """All at once."""
        async with self.client() as client:
            return await asyncio.gather(*(stream_answer(client, "/v1/completions", body) for body in bodies))

    def body(self, prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
        common = {"model": self.model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return common | {"return_token_ids": True, "temperature": 0} | extra

    async def end(self) -> None:
        for process in self._all:
            if process.returncode is None:
                process.kill()
        for process in self._all:
            await process.wait()
        for node in self.nodes.values():
            unlink_all(node.shm_prefix)

    def logs(self) -> str:
        """The last lines of every process, for a failure."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))


def host_pools(cell: CellStatus) -> list[str]:
    """Storages that have one."""
    return [pool.owner for pool in cell.pools if pool.tier == "host"]


def _incarnations(cell: CellStatus) -> dict[str, str]:
    """Those of workers and storages that count as alive."""
    return cell.storage_incarnations | {worker.worker_id: worker.incarnation for worker in cell.workers}


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def running_machines(
    urls: tuple[str, ...],
    model: Path,
    folder: Path,
    *,
    has_disks: bool,
    storage: dict[str, Any],
    names: tuple[str, ...] = ("a", "b"),
    networks: NodeNetworks | None = None,
    **scheduler: Any,
) -> AsyncIterator[Machines]:
    """A cell without nodes yet; everything of it has ended behind the block, and after a failure its logs are shown."""
    bus = await connect(urls, "test")
    made = Machines(urls, model, bus, folder, storage, has_disks=has_disks, names=names, networks=networks)
    try:
        await made.start_centre(**scheduler)
        yield made
    except (Exception, asyncio.CancelledError):
        print(made.logs())
        raise
    finally:
        await made.end()
        await bus.close()
