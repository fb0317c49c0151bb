"""A flush of the object store: all that can be deleted is, and what is left is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import structlog

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.drops import PAUSES_S, Drops
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import RemoteTier
from shared.errors import TransportError
from shared.messages.storage_plans import DropChunks
from tests.chunk_makers import make_chain
from tests.disk_node import Told
from tests.memory_backend import MemoryBackend

CHAIN = make_chain(8, seed=1)
NAMESPACE = CHAIN[0].key.namespace


class _Store(MemoryBackend):
    """Refuses to delete some chunks, all of a request, and answers no listing while it is away."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**20)
        self.stuck: set[ChunkKey] = set()
        self.is_away = False
        for chunk in CHAIN:
            self.put(chunk.key, chunk.blob, stripe=0, timeout_s=1.0)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        if self.is_away:
            raise TransportError("no route")
        yield from super().entries(namespace)

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        if self.stuck & set(keys):
            raise TransportError("access denied")
        await super().remove(keys, timeout_s=timeout_s)


class _Dropping:
    def __init__(self, on_pause: Callable[[], None]) -> None:
        self.store = _Store()
        self.slept_s: list[float] = []
        self._on_pause = on_pause
        threads = IoThreads(2)
        self.drops = Drops(
            disk=None,
            remote=RemoteTier(self.store, threads, timeout_s=1.0),
            uploads=None,
            reconciliation=None,
            warm_start=None,
            threads=threads,
            events=Told(),  # type: ignore[arg-type]
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._on_pause()

    async def drop(self, namespace: str = NAMESPACE) -> list[str]:
        """The events in the log."""
        with structlog.testing.capture_logs() as lines:
            self.drops.add(DropChunks(namespace=namespace, tiers=("remote",)), [], [])
            async with asyncio.timeout(20.0):
                while len(self.drops):
                    await asyncio.sleep(0)
        return [line["event"] for line in lines]


@asynccontextmanager
async def _dropping(on_pause: Callable[[], None] = lambda: None) -> AsyncIterator[_Dropping]:
    made = _Dropping(on_pause)
    task = asyncio.create_task(made.drops.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_object_that_cannot_be_deleted_keeps_no_other() -> None:
    """It is tried a few times, and is a fault until a flush deletes it."""
    async with _dropping() as made:
        made.store.stuck = {CHAIN[3].key}
        events = await made.drop()
        left, faults = [entry.key for entry in made.store.entries()], list(made.drops.faults())
        made.store.stuck = set()
        again = await made.drop()

        assert (events, left) == (["chunks_not_dropped"], [CHAIN[3].key])
        assert made.slept_s == list(PAUSES_S)
        assert [(what, setting) for what, _, setting in faults] == [("flush", "--remote")]
        assert "1 chunks" in faults[0][1]
        assert "access denied" in faults[0][1]
        assert (again, list(made.store.entries()), list(made.drops.faults())) == (["chunks_dropped"], [], [])


@pytest.mark.parametrize("namespace", ["", NAMESPACE])
async def test_a_flush_outlives_a_short_outage(namespace: str) -> None:
    """The store is listed again when it answers."""

    def answer() -> None:
        made.store.is_away = False

    async with _dropping(answer) as made:
        made.store.is_away = True
        events = await made.drop(namespace)

        assert (events, made.slept_s) == (["chunks_dropped"], [PAUSES_S[0]])
        assert (list(made.store.entries()), list(made.drops.faults())) == ([], [])
