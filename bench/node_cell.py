"""A cell of several nodes on one machine, started process by process: a broker, a scheduler, a gateway, and nodes.

Each node has a storage and a worker. Where the machine allows it, nodes have networks and /dev/shm of their own
(:mod:`bench.node_networks`); elsewhere all are on loopback.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from bench import raw_link
from bench.node_networks import DEVICE, NodeNetworks, why_not
from services.gateway.cache_calls import CacheCalls
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.errors import Unavailable
from shared.memory import unlink_all
from shared.messages.status import CellStatus
from thermocline.supervisor.nats_config import nats_config_text
from thermocline.supervisor.nats_program import find_nats_program
from thermocline.supervisor.nats_server import wait_until_up
from thermocline.supervisor.ports import free_ports

READY_S = 300.0
SERVER_NAME = "node-cell"
_POLL_S = 0.05


class NodeCell:
    """A context; everything that was started has ended behind it.

    ``host`` is an address of this process that nodes reach, ``environ`` what processes have from now on.
    """

    def __init__(self, folder: Path, model: Path, names: tuple[str, ...], environ: Mapping[str, str]) -> None:
        """``environ`` is added to what the processes of nodes have."""
        self._folder = folder
        self._model = model
        self.environ = {**os.environ, **environ}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        reason = why_not()
        self._networks = None if reason else self._stack.enter_context(NodeNetworks(names))
        self.network = f"loopback ({reason})" if reason else "network namespaces of one machine"
        self.environ["UCX_NET_DEVICES"] = DEVICE if self._networks else "lo"
        self._shm = {name: f"bench-{os.getpid()}-{name}-{secrets.token_hex(3)}" for name in names}
        self.host = self._networks.address if self._networks else "127.0.0.1"
        self._nats_port, self._http_port = free_ports(2)
        self.nats_url = f"nats://{self.host}:{self._nats_port}"
        self.base_url = f"http://127.0.0.1:{self._http_port}"

    async def start(self, *, scheduler: Mapping[str, Any], gateway: Mapping[str, Any]) -> Bus:
        """Start broker, scheduler and gateway; returns a connection to the broker."""
        config = self._folder / "nats.conf"
        text = nats_config_text(
            server_name=SERVER_NAME, host=self.host, port=self._nats_port, store_dir=self._folder / "store"
        )
        config.write_text(text, encoding="utf-8")
        self._spawn("nats", [str(find_nats_program().path), "-c", str(config)])
        await wait_until_up(SERVER_NAME, self.host, self._nats_port, timeout_s=READY_S)
        self._start("scheduler", "scheduler", [], **scheduler)
        self._start("gateway", "gateway", [], model=self._model, port=self._http_port, **gateway)
        return await connect((self.nats_url,), "bench")

    def start_storage(self, node: str, **settings: Any) -> None:
        """Start the storage of a node."""
        self._start("storage", f"storage-{node}", self._prefix(node), **self._about("storage", node), **settings)

    def start_worker(self, node: str, **settings: Any) -> None:
        """Start the worker of a node."""
        about = self._about("worker", node)
        self._start("worker", f"worker-{node}", self._prefix(node), model=self._model, **about, **settings)

    def raw_times_s(self, source: str, sink: str, nbytes: int, repeats: int) -> dict[int, list[float]]:
        """Seconds that plain sockets take to bring bytes from a node to another, by number of streams."""
        host = self._networks.addresses[source] if self._networks else "127.0.0.1"
        return raw_link.between(self._prefix(source), self._prefix(sink), host, nbytes, repeats)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    async def until(self, bus: Bus, claim: Callable[[CellStatus], bool]) -> CellStatus:
        """Wait until the scheduler's status is so. Raises SystemExit, with logs, when a process ends or time is up."""
        deadline_s = time.monotonic() + READY_S
        while all(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline_s:
            status = await _status(bus)
            if status is not None and claim(status):
                return status
            await asyncio.sleep(_POLL_S)
        raise SystemExit(f"the cell did not come so far\n{self.logs()}")

    async def ready(self, bus: Bus, workers: tuple[str, ...]) -> None:
        """Wait until these workers, and a host pool for each storage, are there and the gateway answers."""
        await self.until(bus, lambda cell: [worker.worker_id for worker in cell.workers] == list(workers))
        await self.until(
            bus, lambda cell: {pool.owner for pool in cell.pools if pool.tier == "host"} == {*cell.storages}
        )
        async with httpx.AsyncClient(base_url=self.base_url, trust_env=False) as client, asyncio.timeout(READY_S):
            while not await _is_ready(client):  # noqa: ASYNC110 - a server that starts tells nobody.
                await asyncio.sleep(_POLL_S)

    def logs(self) -> str:
        """The last lines of every process."""
        texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in self._folder.glob("*.log")}
        return "\n".join(f"{name}:\n{text[-2000:]}" for name, text in sorted(texts.items()))

    def __enter__(self) -> NodeCell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for prefix in self._shm.values():
            unlink_all(prefix)
        self._stack.close()

    def _about(self, kind: str, node: str) -> dict[str, Any]:
        return {"id": f"{kind}-{node}", "node": node, "shm_prefix": self._shm[node]}

    def _prefix(self, node: str) -> list[str]:
        return self._networks.command(node) if self._networks else []

    def _start(self, module: str, name: str, prefix: list[str], **settings: Any) -> None:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        common = ["--nats", self.nats_url, "--log-level", "info"]
        self._spawn(name, [*prefix, sys.executable, "-m", f"services.{module}", *common, *flags])

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ)


async def _status(bus: Bus) -> CellStatus | None:
    try:
        return await CacheCalls(bus).status()
    except Unavailable:
        return None  # It starts.


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
