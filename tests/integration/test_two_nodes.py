"""Two nodes of one cell as real processes, on a NATS cluster of three: they share prefixes through an object store, and
when all of one node dies at once, the other goes on with its requests.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import Unavailable
from shared.memory import unlink_all
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.status import CellStatus, GetInventory, Inventory
from tests.checkpoints import VOCAB_SIZE
from tests.conformance.object_stores import S3Place
from tests.idle import ask_status, settled
from tests.integration.conftest import Checkpoints
from tests.integration.decided_load import asked_until, decided_body, differing
from tests.nats_server import NatsCluster
from tests.run_name import RUN
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

READY_S = 240.0
DOCUMENT_TOKENS = 256
PAGE_SIZE = 16
REQUESTS = 8
ANSWER_TOKENS = 100


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

    def __init__(self, cluster: NatsCluster, model: Path, bus: Bus, folder: Path, remote: str) -> None:
        self.cluster, self.model, self.bus = cluster, model, bus
        self.port = free_port()
        self._folder = folder
        self._remote = remote
        self._all: list[Process] = []
        self.nodes = {name: Node(name, folder) for name in ("a", "b")}

    async def start(self, module: str, name: str, **settings: Any) -> Process:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        common = ["--nats", ",".join(self.cluster.urls), "--log-level", "info"]
        with (self._folder / f"{name}-{len(self._all)}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"services.{module}", *common, *flags, stdout=log, stderr=log
            )
        self._all.append(process)
        return process

    async def start_centre(self) -> None:
        """Scheduler and gateway."""
        await self.start("scheduler", "scheduler", stream_replicas=3, host_writes="through", prefetch_wait="full")
        await self.start("gateway", "gateway", model=self.model, port=self.port)

    async def start_storage(self, node: Node) -> None:
        node.processes["storage"] = await self.start(
            "storage",
            f"storage-{node.name}",
            id=f"storage-{node.name}",
            node=node.name,
            shm_prefix=node.shm_prefix,
            host_kv_bytes="16MiB",
            hidden_bytes=0,
            disk_dir=node.disk,
            disk_kv_bytes="64MiB",
            remote=self._remote,
        )

    async def start_worker(self, node: Node) -> None:
        node.processes["worker"] = await self.start(
            "worker",
            f"worker-{node.name}",
            id=f"worker-{node.name}",
            node=node.name,
            shm_prefix=node.shm_prefix,
            model=self.model,
            dtype="float32",
            threads=1,
            page_size=PAGE_SIZE,
            device_kv_bytes=4_000_000,
        )

    async def status(self) -> CellStatus | None:
        try:
            return await ask_status(self.bus)
        except Unavailable:
            return None  # It starts, or the broker elects a leader.

    async def until(self, claim: Callable[[CellStatus], bool]) -> CellStatus:
        """Wait until the scheduler's status is so."""
        async with asyncio.timeout(READY_S):
            while (status := await self.status()) is None or not claim(status):
                await asyncio.sleep(0.05)
        return status

    async def ready(self, workers: int) -> None:
        """Wait until so many workers with pools and storages are there, and the gateway answers."""
        await self.until(lambda cell: len(cell.workers) == workers and len(_nodes(cell, "host")) == workers)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            async with asyncio.timeout(READY_S):
                while not await _is_ready(http):
                    await asyncio.sleep(0.05)

    async def settle(self, workers: int) -> CellStatus:
        return await settled(self.status, workers=workers)

    async def uploaded(self, node: Node) -> None:
        """Wait until all that the storage has saved is in the object store."""
        subject = subjects.rpc("storage", "inventory", f"storage-{node.name}")
        async with asyncio.timeout(READY_S):
            while True:
                counters = decode(await self.bus.call(subject, encode(GetInventory())), Inventory).counters
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


def _nodes(cell: CellStatus, tier: str) -> list[str]:
    return [pool.owner for pool in cell.pools if pool.tier == tier]


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three servers, each on a loopback address of its own."""
    made = NatsCluster(tmp_path / "nats", hosts=("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
async def machines(cluster: NatsCluster, checkpoints: Checkpoints, tmp_path: Path) -> AsyncIterator[Machines]:
    """A cell without nodes yet."""
    model, _ = checkpoints["llama"]
    place = S3Place()
    async with _running(cluster, model, tmp_path, place) as made:
        yield made
    place.close()


@asynccontextmanager
async def _running(cluster: NatsCluster, model: Path, folder: Path, place: S3Place) -> AsyncIterator[Machines]:
    bus = await connect(cluster.urls, "test")
    with place.environment():
        made = Machines(cluster, model, bus, folder, place.config().remote)
        try:
            await made.start_centre()
            yield made
        except (Exception, asyncio.CancelledError):
            print(made.logs())
            raise
        finally:
            await made.end()
            await bus.close()


def document(seed: int) -> tuple[list[int], random.Random]:
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)], rng


async def test_a_node_that_dies_leaves_its_requests_and_its_prefixes_to_the_other(
    machines: Machines, checkpoints: Checkpoints
) -> None:
    """Worker, storage and NATS server of node a are killed at once, under load; no answer differs by a token. What was
    computed there before node b was started, node b restores from the object store.
    """
    model, reference = checkpoints["llama"]
    a, b = machines.nodes["a"], machines.nodes["b"]
    tokens, rng = document(1)
    shared, tails = document(2)

    def draw() -> list[int]:
        return [*tokens, *(rng.randrange(8, VOCAB_SIZE) for _ in range(9))]

    def draw_load(n: int) -> list[int]:
        return [*shared[: 64 * (n % 4)], *(tails.randrange(8, VOCAB_SIZE) for _ in range(40 + n))]

    first, second = (reference.decided(draw, 8, ignore_eos=True) for _ in range(2))
    bodies = [
        decided_body(reference, model.name, functools.partial(draw_load, n), ANSWER_TOKENS, is_sampled=n % 2 == 1)
        for n in range(REQUESTS)
    ]
    await machines.start_storage(a)
    await machines.start_worker(a)
    await machines.ready(1)
    (computed,) = await machines.ask(machines.body(first, 8))
    await machines.settle(1)
    await machines.uploaded(a)
    await machines.start_storage(b)
    await machines.start_worker(b)
    await machines.ready(2)
    calm = await machines.ask(*bodies)
    before = await machines.settle(2)

    is_over = asyncio.Event()
    async with machines.client() as client:
        load = asyncio.create_task(asked_until(client, bodies, is_over))
        await machines.until(
            lambda cell: {each.worker_id for each in cell.workers if each.running} == {"worker-a", "worker-b"}
        )
        machines.cluster.servers[0].kill()
        for kind in ("worker", "storage"):
            os.kill(a[kind].pid, signal.SIGKILL)
        is_over.set()
        fired = await load
    # The storage is given up after its worker: that one is seen to die, this one falls silent.
    await machines.until(lambda cell: _nodes(cell, "host") == ["storage-b"])
    after = await machines.settle(1)
    (restored,) = await machines.ask(machines.body(second, 8))
    await machines.settle(1)

    assert differing(calm, fired) == []
    assert all(len(answer.token_ids) == ANSWER_TOKENS for answer in calm)
    assert after.counters["requests_accepted"] == after.counters["finished_length"]
    assert after.counters["finished_length"] == 1 + REQUESTS + sum(map(len, fired))
    assert after.counters["workers_lost"] == before.counters.get("workers_lost", 0) + 1
    assert computed.token_ids == reference.greedy(first, 8, ignore_eos=True)
    assert restored.token_ids == reference.greedy(second, 8, ignore_eos=True)
    assert computed.cached_tokens == 0
    assert restored.remote_tokens == restored.cached_tokens == DOCUMENT_TOKENS
    # What came from the store is on the disk of node b now.
    assert any(path.is_file() for path in b.disk.rglob("*"))
