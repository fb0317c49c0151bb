"""A whole cell in one process: every service's own composition root on one event loop, and a real NATS server.

Nothing is faked; only process boundaries are missing, which saves the seconds that starting five interpreters
takes. Tests that need those boundaries (kills, signals, leftovers) use ``thermocline.supervisor.api``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.gateway import bootstrap as gateway
from services.gateway.config import GatewayConfig
from services.scheduler import bootstrap as scheduler
from services.scheduler.config import SchedulerConfig
from services.storage import bootstrap as storage
from services.storage.config import StorageConfig
from services.worker import bootstrap as worker
from services.worker.config import WorkerConfig
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.errors import Unavailable
from shared.lifecycle import Lifecycle
from shared.memory import unlink_all
from shared.messages.cell_events import FlushCache
from shared.messages.pools import HIDDEN
from shared.messages.status import CellStatus, GetInventory, Inventory
from tests.idle import ask_status, hears_of_chunks, settled, status_from
from tests.run_name import RUN
from thermocline.supervisor.ports import free_port

READY_S = 120.0
IDLE_S = 60.0
CALL_S = 60.0
"""Of calls to processes that are there: a bound for a machine that has much else to do."""
UNHURRIED = {"lead_ms": 10_000, "heartbeat_lost_ms": 3_600_000}
"""One loop runs everything here, and it may stand still for longer than a process's own loop ever does."""


@dataclass
class Cell:
    """A handle on a running cell."""

    base_url: str
    bus: Bus
    http: httpx.AsyncClient
    model: str
    shm_prefix: str
    lives: dict[str, Lifecycle] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def status(self) -> CellStatus:
        """What the scheduler thinks."""
        return await status_from(self.bus)

    async def inventory(self, worker_id: str = "worker-0") -> Inventory:
        """What a worker really did."""
        subject = subjects.rpc("worker", "inventory", worker_id)
        return decode(await self.bus.call(subject, encode(GetInventory()), timeout_s=CALL_S), Inventory)

    async def storage_inventory(self) -> Inventory:
        """What the storage holds and did."""
        subject = subjects.rpc("storage", "inventory", "storage-0")
        return decode(await self.bus.call(subject, encode(GetInventory()), timeout_s=CALL_S), Inventory)

    async def knows_of(self, requests: int) -> None:
        """Wait until the scheduler has so many requests, queued or running; they may not end meanwhile."""
        async with asyncio.timeout(IDLE_S):
            while (status := await self.status()).queued + status.running < requests:
                await asyncio.sleep(0.01)

    async def hears_of_chunks(self, count: int) -> None:
        """See :func:`tests.idle.hears_of_chunks`."""
        await hears_of_chunks(self.status, count, timeout_s=READY_S)

    async def flush(self, *tiers: str) -> CellStatus:
        """Drop what nothing uses from these tiers; returns when nothing moves any more.

        What the storage does behind everybody's back, uploads and promotions to its disk, is over before it begins.
        """
        async with asyncio.timeout(IDLE_S):
            while await self._moves_in_storage():
                await asyncio.sleep(0.01)
        order = FlushCache(call_id=secrets.token_hex(8), tiers=tiers)
        seq = await self.bus.append(subjects.cell_input(), encode(order), message_id=order.call_id)
        async with asyncio.timeout(IDLE_S):
            while (await self.status()).seq < seq:
                await asyncio.sleep(0.01)
        return await self.settle()

    async def _moves_in_storage(self) -> int:
        counters = (await self.storage_inventory()).counters
        return sum(count for name, count in counters.items() if name.endswith("_outstanding"))

    async def complete(self, prompt: list[int] | list[list[int]], max_tokens: int, **extra: Any) -> dict[str, Any]:
        """POST /v1/completions with token ids, of one prompt or several, greedy unless told otherwise."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = await self.http.post("/v1/completions", json=body | {"return_token_ids": True} | extra)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def settle(self) -> CellStatus:
        """Wait until nothing runs, waits or moves, and check the pages: free + cached = total in every pool."""
        return await settled(self.status, timeout_s=IDLE_S)


@asynccontextmanager
async def running_cell(
    nats_url: str,
    model: Path,
    *,
    workers: int = 1,
    worker_settings: dict[str, Any] | None = None,
    first_worker: dict[str, Any] | None = None,
    scheduler_settings: dict[str, Any] | None = None,
    gateway_settings: dict[str, Any] | None = None,
    storage_settings: dict[str, Any] | None = None,
    host_kv_bytes: int = 64 * 2**20,
) -> AsyncIterator[Cell]:
    """A cell on a NATS server of its own; ready when the block is entered, and idle and whole at its end.

    Settings of the ``first_worker`` alone count for more than those of all.
    """
    prefix = f"{RUN}-{secrets.token_hex(4)}"
    port = free_port()
    common: dict[str, Any] = {"nats": (nats_url,), "log_level": "warning"}
    # Tokens are compared, and a pool's size must not depend on what this machine has free.
    fixed = {"device": "cpu", "dtype": "float32", "threads": 1, "device_kv_bytes": 64 * 2**20}
    fixed |= {"measure_at_start": False}
    worker_common = {"model": str(model), "shm_prefix": prefix, **fixed, **common}
    gateway_common: dict[str, Any] = {"model": str(model), "port": port, "grace_ms": 500}
    parts: dict[str, tuple[Any, Any]] = {
        "scheduler": (
            scheduler.run,
            SchedulerConfig(**common, **({"check_invariants_every": 1} | UNHURRIED | (scheduler_settings or {}))),
        ),
        "storage": (
            storage.serve,
            StorageConfig(
                **common,
                shm_prefix=prefix,
                **(
                    {"host_kv_bytes": host_kv_bytes, "threads": 1, "measure_at_start": False} | (storage_settings or {})
                ),
            ),
        ),
        "gateway": (
            gateway.run,
            GatewayConfig(**common, **(gateway_common | (gateway_settings or {}))),
        ),
    }
    for number in range(workers):
        own = (worker_settings or {}) | ((first_worker or {}) if number == 0 else {})
        config = WorkerConfig(**(worker_common | {"id": f"worker-{number}"} | own))
        parts[f"worker-{number}"] = (worker.serve, config)
    bus = await connect((nats_url,), "test")
    # Plain HTTP: reading all the certificates of this machine would take longer than the requests of most tests.
    http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, verify=False)
    cell = Cell(str(http.base_url), bus, http, model.name, prefix)
    try:
        host_pools, joined = int((scheduler_settings or {}).get("host_tier", True)), 0
        for name, (serve, settings) in parts.items():
            cell.lives[name] = Lifecycle()
            cell.tasks[name] = asyncio.create_task(serve(settings, cell.lives[name]), name=name)
            if name.startswith("worker"):
                # One after another: to load a model changes settings of torch, and reads Python's sources by its
                # parser, none of which two threads may do at once.
                joined += 1
                await _ready(cell, joined, joined + host_pools)
        yield cell
        await cell.settle()
    finally:
        # The order in which the supervisor stops them.
        for name in ("gateway", *(n for n in parts if n.startswith("worker")), "storage", "scheduler"):
            cell.lives[name].stop()
            await asyncio.gather(cell.tasks[name], return_exceptions=True)
        await http.aclose()
        await bus.close()
        unlink_all(prefix)
    for task in cell.tasks.values():
        task.result()


async def _ready(cell: Cell, workers: int, pools: int) -> None:
    """Wait for the gateway's readiness, all workers and all pools; a service that ends meanwhile raises its reason."""
    async with asyncio.timeout(READY_S):
        while True:
            for task in cell.tasks.values():
                if task.done():
                    task.result()
            try:
                response = await cell.http.get("/health/ready")
                status = await ask_status(cell.bus) if response.status_code == httpx.codes.OK else None
            except (httpx.HTTPError, Unavailable):
                status = None
            made = [] if status is None else [pool for pool in status.pools if pool.tier != HIDDEN]
            if status is not None and len(status.workers) == workers and len(made) == pools:
                return
            await asyncio.sleep(0.05)
