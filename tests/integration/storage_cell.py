"""A whole storage with tiers below host memory, over a bus in this process, and the scheduler's side of it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from services.storage.backends import ChunkBackend, ChunkEntry, ChunkKey
from services.storage.chunk_format import blob_nbytes
from services.storage.config import StorageConfig
from services.storage.media import Media
from services.storage.pools import Pools
from services.storage.shell import StorageShell
from shared import subjects
from shared.bus.protocol import Bus, StreamLimits
from shared.chunks import chunk_names, chunk_pages, chunk_tokens
from shared.codec import Input, decode, decode_input, encode
from shared.errors import CapacityError, TransportError, Unavailable
from shared.ids import DIGEST_BYTES, chain_pages, chain_root, namespace_digest
from shared.lifecycle import Lifecycle
from shared.memory import DevicePoolView, HostPoolView, SharedSegment
from shared.memory.host_pool import nbytes_for
from shared.messages.base import Message, pack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.status import ChunksVerified, GetInventory, Inventory, Standing, VerifyChunks
from shared.messages.storage_events import (
    BackupDone,
    ChunksFetched,
    ChunksSaved,
    HostPoolCreated,
    StorageJoined,
)
from shared.messages.storage_plans import (
    AttachDevicePool,
    BackupPages,
    CreateHostPool,
    FetchChunks,
    SaveChunks,
    SaveOrder,
    StorageOrder,
    StoragePlan,
)
from tests.memory_backend import MemoryBackend
from tests.memory_bus import MemoryBroker
from tests.one_directory import OneDirectory
from tests.remote_calls import RemoteCalls

E = TypeVar("E", bound=Message)

GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, page_size=16, dtype="float16")
NAMESPACE = namespace_digest("model")
DEVICE_PAGES = 64
HOST_PAGES = 64
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Sequence:
    """Whole chunks of one prompt: its tokens, packed, and the identities of its pages, 16 bytes each."""

    geometry: KvGeometry
    namespace: str
    tokens: bytes
    identities: bytes

    @classmethod
    def make(cls, seed: int, chunks: int, *, namespace: str = NAMESPACE, geometry: KvGeometry = GEOMETRY) -> Sequence:
        count = chunks * chunk_tokens(geometry.page_size)
        tokens = pack_int32(np.random.default_rng(seed).integers(0, 1000, count))
        identities = chain_pages(chain_root(namespace), tokens, geometry.page_size * 4)
        return cls(geometry, namespace, tokens, identities)

    @property
    def pages(self) -> int:
        return len(self.identities) // DIGEST_BYTES

    @property
    def names(self) -> list[bytes]:
        return chunk_names(self.identities, chunk_pages(self.geometry.page_size))

    def identity(self, page: int) -> bytes:
        return self.identities[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]


class GatedBackend(RemoteCalls, OneDirectory):
    """A tier whose puts and gets wait for gates, and fail as told."""

    name = "gated"

    def __init__(self, inner: ChunkBackend) -> None:
        super().__init__()
        self.inner = inner
        self.put_gate, self.get_gate = threading.Event(), threading.Event()
        self.put_gate.set()
        self.get_gate.set()
        self.patience_s = TIMEOUT_S  # How long a get waits for its gate before it fails.
        self.put_entered, self.get_entered = threading.Event(), threading.Event()
        self.put_error: Exception | None = None
        self.get_error: Exception | None = None
        self.puts = 0
        self.gets = 0

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        self.puts += 1
        self.put_entered.set()
        assert self.put_gate.wait(TIMEOUT_S)
        if self.put_error is not None:
            raise self.put_error
        return self.inner.put(key, blob, stripe=stripe, timeout_s=timeout_s)

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        self.gets += 1
        self.get_entered.set()
        if not self.get_gate.wait(self.patience_s):
            raise TransportError("no answer in time")
        if self.get_error is not None:
            raise self.get_error
        return self.inner.get(key, into, timeout_s=timeout_s)

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        return self.inner.delete(key, timeout_s=timeout_s)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        return self.inner.entries(namespace)

    def close(self) -> None:
        self.inner.close()


FULL = CapacityError("no space left on device")
GONE = TransportError("connection refused")


class StorageCell:
    """A running storage with a host pool and one worker's device pool of random bytes."""

    def __init__(
        self, bus: Bus, geometry: KvGeometry, life: Lifecycle | None = None, task: asyncio.Task[None] | None = None
    ) -> None:
        self.bus = bus
        self.life = life or Lifecycle()
        self.task = task
        self.geometry = geometry
        self.joined: StorageJoined | None = None
        self.host: HostPoolView | None = None
        self.device: DevicePoolView | None = None
        self._events = self.bus.follow(subjects.INPUTS_STREAM)
        self.ordered = 0
        self._ids = 0
        self.seen: list[Input] = []
        self._passed: list[Input] = []  # Seen on the way to an event of another kind.
        self.may_lose_its_broker = False
        self.is_member = True  # What the scheduler says when it is asked.
        self.asked_for_standing = 0

    async def answer_standing(self) -> None:
        """Say whether the storage is a member whenever it asks."""

        async def answer(data: bytes) -> bytes:
            self.asked_for_standing += 1
            return encode(Standing(is_member=self.is_member))

        await self.bus.serve(subjects.rpc("scheduler", "standing"), answer)

    async def order(self, order: StorageOrder) -> None:
        assert self.joined is not None
        self.ordered += 1
        plan = StoragePlan(
            storage_id="s0", incarnation=self.joined.incarnation, number=self.ordered, epoch=1, cause=1, order=order
        )
        if self.may_lose_its_broker:
            await self._store(plan)
        else:
            await self.bus.publish(subjects.storage_output("s0"), encode(plan))

    async def _store(self, plan: StoragePlan) -> None:
        """Have the broker keep it, as soon as that is back: what is only published is lost on connections that died."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await self.bus.append(
                        subjects.storage_output("s0"), encode(plan), message_id=f"{plan.incarnation}.{plan.number}"
                    )
                    return
                except Unavailable:
                    await asyncio.sleep(0.1)

    async def event(self, kind: type[E]) -> E:
        """The first event of this kind that has not been returned yet; events of two kinds may come in any order."""
        for event in self._passed:
            if isinstance(event, kind):
                self._passed.remove(event)
                return event
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                event = decode_input((await anext(self._events)).data)
                self.seen.append(event)
                if isinstance(event, kind):
                    return event
                self._passed.append(event)

    def save_order(self, sequence: Sequence, *, device: list[int] | None = None, host: list[int] | None = None,
                   first: int = 0, chunks: int | None = None, **change: object) -> SaveChunks:  # fmt: skip
        """A save of chunks [first, first + chunks) from device pages, or from host pages."""
        pages, tokens = chunk_pages(self.geometry.page_size), chunk_tokens(self.geometry.page_size)
        count = len(sequence.names) - first if chunks is None else chunks
        nowhere = [-1] * (count * pages)
        self._ids += 1
        fields: dict[str, object] = {
            "save_id": self._ids,
            "namespace": sequence.namespace,
            "depth": first * tokens,
            "tokens": sequence.tokens[first * tokens * 4 : (first + count) * tokens * 4],
            "parent": sequence.identity(first * pages - 1) if first else chain_root(sequence.namespace),
            "identities": sequence.identities[first * pages * 16 : (first + count) * pages * 16],
            "host_pages": pack_int32(nowhere if host is None else host),
            "device_pages": pack_int32(nowhere if device is None else device),
            "worker_id": "" if device is None else "w0",
            "worker_incarnation": "" if device is None else "i0",
        }
        return SaveChunks(**(fields | change))  # type: ignore[arg-type]

    async def save(self, sequence: Sequence, **where: object) -> ChunksSaved:
        return await self.saved(self.save_order(sequence, **where))  # type: ignore[arg-type]

    async def saved(self, order: SaveOrder) -> ChunksSaved:
        """Order a save, and return its answer."""
        await self.order(order)
        saved = await self.event(ChunksSaved)
        assert saved.save_id == order.save_id
        return saved

    def fetch_order(self, sequence: Sequence, host: list[int], *, first: int = 0, **change: object) -> FetchChunks:
        pages, tokens = chunk_pages(self.geometry.page_size), chunk_tokens(self.geometry.page_size)
        self._ids += 1
        fields: dict[str, object] = {
            "fetch_id": self._ids,
            "namespace": sequence.namespace,
            "depth": first * tokens,
            "identities": sequence.identities[first * pages * 16 :],
            "host_pages": pack_int32(host),
            "deadline_ms": 20_000,
        }
        return FetchChunks(**(fields | change))  # type: ignore[arg-type]

    async def fetch(self, sequence: Sequence, host: list[int], **change: object) -> ChunksFetched:
        """Fetch, and return the last event."""
        order = self.fetch_order(sequence, host, **change)  # type: ignore[arg-type]
        await self.order(order)
        return await self.fetched(order.fetch_id)

    async def fetched(self, fetch_id: int) -> ChunksFetched:
        while True:
            fetched = await self.event(ChunksFetched)
            assert fetched.fetch_id == fetch_id
            if fetched.is_over:
                return fetched

    async def backup(self, sequence: Sequence, device: list[int], host: list[int]) -> BackupDone:
        await self.order(self.backup_order(sequence, device, host))
        return await self.event(BackupDone)

    def backup_order(self, sequence: Sequence, device: list[int], host: list[int]) -> BackupPages:
        self._ids += 1
        return BackupPages(
            transfer_id=self._ids,
            worker_id="w0",
            worker_incarnation="i0",
            device_pages=pack_int32(device),
            host_pages=pack_int32(host),
            identities=sequence.identities[: len(host) * 16],
        )

    async def inventory(self) -> Inventory:
        subject = subjects.rpc("storage", "inventory", "s0")
        return decode(await self.bus.call(subject, encode(GetInventory()), timeout_s=TIMEOUT_S), Inventory)

    async def verify(self, call: VerifyChunks) -> ChunksVerified:
        answer = await self.bus.call(subjects.rpc("storage", "verify", "s0"), encode(call), timeout_s=TIMEOUT_S)
        return decode(answer, ChunksVerified)

    async def stop(self) -> None:
        self.life.stop()
        if self.task is not None:
            async with asyncio.timeout(TIMEOUT_S):
                await self.task

    async def idle(self) -> dict[str, int]:
        """The counters once every order has been taken and nothing is under way."""
        kinds = ("saves", "fetches", "removals", "uploads", "reconcile", "promotions", "drops")
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                inventory = await self.inventory()
                counters = inventory.counters
                if inventory.last_plan == self.ordered and not any(
                    counters.get(f"{kind}_outstanding") for kind in kinds
                ):
                    return counters
                await asyncio.sleep(0.01)

    async def uploaded(self, count: int) -> None:
        """Wait until so many chunks are in the object store."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.inventory()).counters["chunks_uploaded"] < count:
                await asyncio.sleep(0.01)

    def begin_incarnation(self) -> None:
        """The storage starts anew: plans are counted from one again."""
        self.ordered = 0

    async def rest(self) -> list[Input]:
        """Events that were not read yet."""
        messages = self.bus.follow(subjects.INPUTS_STREAM, live=False)
        return [decode_input(message.data) async for message in messages][len(self.seen) :]

    def holds(self, sequence: Sequence, pages: list[int], host: list[int], device: list[int]) -> bool:
        """Whether these host pages verify as ``pages`` of the sequence, and equal these device pages bit by bit."""
        assert self.host is not None
        assert self.device is not None
        for page, at, source in zip(pages, host, device, strict=True):
            for layer in range(self.geometry.layers):
                self.host.verify_layer(at, layer, sequence.identity(page))
                if self.host.pages[at, layer].tobytes() != self.device.halves[layer, :, source].tobytes():
                    return False
        return True


@asynccontextmanager
async def running_storage(
    prefix: str,
    media: Media,
    *,
    geometry: KvGeometry = GEOMETRY,
    with_pools: bool = True,
    **settings: object,
) -> AsyncIterator[StorageCell]:
    """A storage with these tiers, joined; with its host pool and a worker's pool attached unless told otherwise."""
    host_bytes = nbytes_for(geometry, HOST_PAGES)
    fields: dict[str, object] = {"id": "s0", "node": "n0", "host_kv_bytes": host_bytes, "shm_prefix": prefix}
    config = StorageConfig(**(fields | settings))  # type: ignore[arg-type]
    broker = MemoryBroker()
    broker.ensure_streams(StreamLimits())
    life = Lifecycle()
    shell = StorageShell(
        config,
        broker.connect("storage"),
        Pools(prefix, host_bytes, config.hidden_bytes, open_device=DevicePoolView.attach),
        media,
        incarnation=f"storage-{secrets.token_hex(4)}",
    )
    cell = StorageCell(broker.connect("scheduler"), geometry, life, asyncio.create_task(shell.run(life)))
    await cell.answer_standing()
    try:
        cell.joined = await cell.event(StorageJoined)
        if with_pools:
            await make_pools(cell, prefix)
        yield cell
    finally:
        await cell.stop()


async def make_pools(cell: StorageCell, prefix: str, **order: bool) -> None:
    """Order a host pool, and attach a worker's device pool of random bytes."""
    geometry = cell.geometry
    await cell.order(CreateHostPool(geometry=geometry, **order))
    created = await cell.event(HostPoolCreated)
    assert created.handle is not None
    cell.host = HostPoolView.attach(created.handle)
    segment = SharedSegment.create(prefix, "device", DEVICE_PAGES * geometry.page_bytes)
    segment.array[:] = np.random.default_rng(7).integers(0, 256, segment.nbytes, dtype=np.uint8)
    handle = PoolHandle(
        kind="shm",
        layout="layer_first",
        name=segment.name,
        nbytes=segment.nbytes,
        pages=DEVICE_PAGES,
        geometry=geometry,
    )
    cell.device = DevicePoolView.attach(handle)
    await cell.order(AttachDevicePool(worker_id="w0", worker_incarnation="i0", handle=handle))


BLOB_BYTES = blob_nbytes(GEOMETRY)


def gated_memory() -> GatedBackend:
    """A backend in memory whose calls a test can hold back or spoil."""
    return GatedBackend(MemoryBackend(max_bytes=2**30))


def flip_byte(file: Path, offset: int) -> None:
    """Spoil one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))
