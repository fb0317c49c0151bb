"""``thermocline kv-events`` beside a live cell: a subscriber knows what the cell has, and learns what goes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared import subjects
from shared.codec import encode
from shared.ids import chain_pages, chain_root, namespace_digest, split_digests
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache
from shared.model_files import fingerprint
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

PAGE_SIZE = 16
DOCUMENT_TOKENS = 96

pytestmark = pytest.mark.integration


class Subscriber:
    """A router: it applies every batch, and notices a missing one."""

    def __init__(self, socket: Any) -> None:
        self.held: dict[str, dict[bytes, list[int]]] = {"GPU": {}, "CPU": {}}
        self._socket = socket
        self._next: int | None = None

    async def until(self, holds: str, blocks: list[bytes], *, present: bool) -> None:
        """Read until a medium holds all these blocks, or none of them."""
        async with asyncio.timeout(60):
            while {block in self.held[holds] for block in blocks} != {present}:
                await self._read()

    async def _read(self) -> None:
        topic, number, payload = await self._socket.recv_multipart()
        assert topic == b"kv-events"
        assert self._next in (None, int.from_bytes(number, "big"))
        self._next = int.from_bytes(number, "big") + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.held = {"GPU": {}, "CPU": {}}
                case "BlockStored":
                    size = event["block_size"]
                    for place, block in enumerate(event["block_hashes"]):
                        self.held[event["medium"]][block] = event["token_ids"][place * size : (place + 1) * size]
                case "BlockRemoved":
                    for block in event["block_hashes"]:
                        del self.held[event["medium"]][block]


@asynccontextmanager
async def _subscribed(nats_url: str) -> AsyncIterator[Subscriber]:
    """A subscriber of the command, which runs as a process and ends by SIGTERM with 0."""
    command = (sys.executable, "-m", "services.scheduler.kv_events", "--bind", "tcp://127.0.0.1:*")
    process = await asyncio.create_subprocess_exec(
        *(*command, "--bind-replay", "tcp://127.0.0.1:*", "--nats", nats_url), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("KV events at tcp://")
        with zmq_asyncio.Context.instance().socket(zmq.SUB) as socket:
            socket.connect(line.split()[3].rstrip(","))
            socket.subscribe(b"kv-events")
            yield Subscriber(socket)
        os.kill(process.pid, signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ask(cell: Cell, prompt: list[int], **extra: str) -> None:
    await cell.complete(prompt, 2, **extra)
    await cell.settle()


async def test_a_subscriber_knows_what_the_cell_has(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """What is computed, with its tokens; what is dropped; and nothing of a caller with a salt."""
    model, _ = checkpoints["llama"]
    rng = random.Random(11)
    first, second, salted = ([rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS + 1)] for _ in range(3))
    root = chain_root(namespace_digest(fingerprint(model)))
    blocks = {
        name: split_digests(chain_pages(root, pack_int32(prompt[:DOCUMENT_TOKENS]), 4 * PAGE_SIZE))
        for name, prompt in (("first", first), ("second", second))
    }
    async with (
        running_cell(nats_server.url, model, worker_settings={"page_size": PAGE_SIZE}) as cell,
        _subscribed(nats_server.url) as reader,
    ):
        await _ask(cell, first)
        await reader.until("GPU", blocks["first"], present=True)
        await _ask(cell, salted, cache_salt="a secret")
        await _ask(cell, second)
        await reader.until("GPU", blocks["second"], present=True)
        seen = dict(reader.held["GPU"])
        flush = FlushCache(call_id="test", tiers=("device", "host"))
        await cell.bus.append(subjects.cell_input(), encode(flush))
        await reader.until("GPU", blocks["first"] + blocks["second"], present=False)

    tokens = [token for block in blocks["first"] for token in seen[block]]
    assert tokens == first[:DOCUMENT_TOKENS]
    assert not any(salted[:PAGE_SIZE] == each for each in seen.values())
