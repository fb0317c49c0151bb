"""Record real runs: ``python -m tests.replay.make_recordings [NAME ...]`` writes ``tests/replay/recordings/``.

Each scenario runs a whole cell (real broker, real worker, a tiny model), drives it over HTTP as clients would,
and exports its streams. The files are replayed by ``test_recordings``; they are to be made anew whenever the core
decides otherwise on purpose, and the review of such a change includes what moved.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.scheduler.record import record
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import encode
from shared.ids import namespace_digest
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache, PinPrefix, UnpinPrefix
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import settled, status_at
from tests.nats_server import NatsServer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

RECORDINGS = Path(__file__).parent / "recordings"
PAGE_SIZE = 16
PAGE_BYTES = 3 * 2 * PAGE_SIZE * 2 * 16 * 4  # layers, K and V, page size, KV heads, head size, float32

Ask = Callable[..., Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Scenario:
    """A cell's settings and what clients do to it."""

    drive: Callable[[Cell], Awaitable[None]]
    device_pages: int = 64
    host_pages: int = 256
    scheduler: dict[str, Any] = field(default_factory=dict)
    has_disk: bool = False
    workers: int = 1


def tokens(rng: random.Random, count: int) -> list[int]:
    """A prompt of ``count`` tokens."""
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


async def shared_documents(cell: Cell) -> None:
    """Six documents, larger together than the device pool, asked twice about."""
    rng = random.Random(1)
    documents = [tokens(rng, 256) for _ in range(6)]
    for _ in range(2):
        for document in documents:
            await asyncio.gather(*(cell.complete(document + tokens(rng, 12), 6) for _ in range(2)))


async def multi_turn_chat(cell: Cell) -> None:
    """Five conversations, whose turns interleave and grow."""
    rng = random.Random(2)
    system = tokens(rng, 48)
    histories = [list(system) for _ in range(5)]

    async def turn(number: int) -> None:
        histories[number] += tokens(rng, 20)
        answer = await cell.complete(histories[number], 12, ignore_eos=True)
        histories[number] += answer["choices"][0]["token_ids"]

    for _ in range(5):
        await asyncio.gather(*(turn(number) for number in range(5)))


async def cancellations(cell: Cell) -> None:
    """Clients that leave in the middle of an answer or while they wait, and deadlines that pass."""
    rng = random.Random(3)

    async def leaves(prompt: list[int]) -> None:
        body = {"model": cell.model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with cell.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    return  # Closing the response in mid-stream is what a client that left looks like.

    shared = tokens(rng, 96)
    prompts = [shared + tokens(rng, 10 + number) for number in range(8)]
    await asyncio.gather(
        *(leaves(prompt) for prompt in prompts[:4]),
        *(cell.complete(prompt, 24) for prompt in prompts[4:]),
    )


async def memory_pressure(cell: Cell) -> None:
    """More long answers at once than the pool holds: preemptions, evictions and host evictions."""
    rng = random.Random(4)
    await asyncio.gather(*(cell.complete(tokens(rng, 60), 200, ignore_eos=True) for _ in range(8)))
    await asyncio.gather(*(cell.complete(tokens(rng, 200), 40, ignore_eos=True) for _ in range(10)))


async def admin_calls(cell: Cell) -> None:
    """Flushes of each tier and changes of settings between requests."""
    rng = random.Random(5)
    document = tokens(rng, 160)

    async def tell(message: FlushCache | CellConfigured) -> None:
        await cell.bus.append(subjects.cell_input(), encode(message))

    await cell.complete(document + tokens(rng, 9), 8)
    await cell.complete(document + tokens(rng, 9), 8)
    await tell(FlushCache(call_id="one", tiers=("device",)))
    await cell.complete(document + tokens(rng, 9), 8)
    await tell(CellConfigured(config=CellConfig(policy="lru", max_batch_tokens=64, host_tier=True)))
    await asyncio.gather(*(cell.complete(tokens(rng, 150), 8) for _ in range(10)))
    await tell(FlushCache(call_id="two"))
    await tell(CellConfigured(config=CellConfig(policy="no-such-policy", max_batch_tokens=128)))
    await cell.complete(document + tokens(rng, 9), 8)


async def burst(cell: Cell) -> None:
    """Sixteen questions at once on one new document, and again on a document in host memory."""
    rng = random.Random(6)
    document = tokens(rng, 320)
    for _ in range(2):
        await asyncio.gather(*(cell.complete(document + tokens(rng, 8), 8) for _ in range(16)))
        for _ in range(4):
            await cell.complete(tokens(rng, 256), 4)


async def promotion(cell: Cell) -> None:
    """A prompt that is often used is driven out by ones that are not, and is promoted again."""
    rng = random.Random(7)
    hot = tokens(rng, 128)
    for _ in range(6):
        for _ in range(3):
            await cell.complete(hot + tokens(rng, 6), 6, ignore_eos=True)
        for _ in range(4):
            await cell.complete(tokens(rng, 240), 30, ignore_eos=True)


async def disk(cell: Cell) -> None:
    """Documents that are written through, dropped from memory, fetched from disk, and pinned."""
    rng = random.Random(8)
    documents = [tokens(rng, 200) for _ in range(3)]
    for document in documents:
        await asyncio.gather(*(cell.complete(document + tokens(rng, 9), 6) for _ in range(2)))
    await cell.flush("device", "host")
    pin = PinPrefix(pin_id="kept", namespace=await namespace(cell), tokens=pack_int32(documents[0]), ttl_ms=600_000)
    await cell.bus.append(subjects.cell_input(), encode(pin))
    await asyncio.gather(*(cell.complete(document + tokens(rng, 9), 6) for document in documents))
    await cell.flush("device", "host")
    await cell.bus.append(subjects.cell_input(), encode(UnpinPrefix(pin_id="kept")))
    await cell.flush("device", "host", "disk")
    await cell.complete(documents[0] + tokens(rng, 9), 6)


async def namespace(cell: Cell) -> str:
    """Of requests without a salt."""
    return namespace_digest((await cell.status()).model)


async def neighbours(cell: Cell) -> None:
    """A burst on a document that one of two workers has spreads over both."""
    rng = random.Random(9)
    document = tokens(rng, 200)
    await cell.complete(document + tokens(rng, 5), 4)
    await asyncio.gather(*(cell.complete(document + tokens(rng, 9), 24) for _ in range(12)))


SCENARIOS = {
    "shared-documents": Scenario(shared_documents),
    "multi-turn-chat": Scenario(multi_turn_chat),
    "cancellations": Scenario(cancellations),
    "memory-pressure": Scenario(memory_pressure, device_pages=40, host_pages=60),
    "admin-calls": Scenario(admin_calls),
    "disk": Scenario(disk, scheduler={"host_writes": "through", "prefetch_wait": "full"}, has_disk=True),
    "neighbours": Scenario(neighbours, scheduler={"host_tier": False, "max_running": 2}, workers=2),
    "burst": Scenario(burst, scheduler={"max_batch_tokens": 1024}),
    "promotion": Scenario(
        promotion,
        device_pages=40,
        scheduler={"policy": "hotprefix", "admission": "selective", "promotion": "hotness", "aging_requests": 4},
    ),
}
WORKER_LOSS = "worker-loss"


async def make(name: str, scenario: Scenario, model: Path) -> None:
    """Run one scenario in a cell of its own and export it."""
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        await _make(name, scenario, model, server.url, Path(folder))


async def _make(name: str, scenario: Scenario, model: Path, url: str, folder: Path) -> None:
    storage: dict[str, Any] = {}
    if scenario.has_disk:
        (folder / "disk").mkdir()
        storage = {"disk_dir": (str(folder / "disk"),), "disk_kv_bytes": 64 * 2**20}
    async with running_cell(
        url,
        model,
        workers=scenario.workers,
        storage_settings=storage,
        worker_settings={"page_size": PAGE_SIZE, "device_kv_bytes": scenario.device_pages * PAGE_BYTES},
        scheduler_settings={"max_batch_tokens": 64, **scenario.scheduler},
        host_kv_bytes=scenario.host_pages * PAGE_BYTES,
    ) as cell:
        await scenario.drive(cell)
        await cell.settle()
        await record(cell.bus, RECORDINGS / f"{name}.tcrec")


async def lose_a_worker(cell: RunningCell, model: str) -> None:
    """Two workers under load, one of which is killed."""
    rng = random.Random(8)
    documents = [tokens(rng, 96) for _ in range(3)]
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=120, trust_env=False) as client:

        async def ask(number: int) -> None:
            prompt = documents[number % 3] + tokens(rng, 8 + number)
            body = {"model": model, "prompt": prompt, "max_tokens": 80, "ignore_eos": True, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        load = asyncio.gather(*(ask(number) for number in range(12)))
        while (await status_at(cell.nats_url)).running < 4:
            await asyncio.sleep(0.005)
        pid = cell.kill("worker-0")
        await asyncio.to_thread(cell.wait_restarted, "worker-0", pid)
        await load
    await settled(lambda: status_at(cell.nats_url), workers=2)
    bus = await connect((cell.nats_url,), "record")
    try:
        await record(bus, RECORDINGS / f"{WORKER_LOSS}.tcrec")
    finally:
        await bus.close()


def main(names: list[str]) -> int:
    """Make the named recordings, or all."""
    unknown = [name for name in names if name not in {*SCENARIOS, WORKER_LOSS}]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join([*SCENARIOS, WORKER_LOSS])}")
        return 2
    RECORDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint("llama", Path(folder) / "llama")
        for name, scenario in SCENARIOS.items():
            if not names or name in names:
                asyncio.run(make(name, scenario, model))
                print(f"{name}: {(RECORDINGS / f'{name}.tcrec').stat().st_size} bytes", flush=True)
        if not names or WORKER_LOSS in names:
            settings = SupervisorConfig(
                model=str(model),
                workers=2,
                threads=1,
                port=0,
                page_size=PAGE_SIZE,
                dtype="float32",
                device_kv_bytes=64 * PAGE_BYTES,
                host_kv_bytes=256 * PAGE_BYTES,
                max_batch_tokens=64,
            )
            with running(settings) as cell:
                asyncio.run(lose_a_worker(cell, model.name))
            print(f"{WORKER_LOSS}: {(RECORDINGS / f'{WORKER_LOSS}.tcrec').stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
