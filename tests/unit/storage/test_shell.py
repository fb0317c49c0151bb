"""A whole storage over a bus in this process: what the scheduler sees of it."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.storage.config import StorageConfig
from services.storage.pools import Pools
from services.storage.sharing import parts
from services.storage.shell import StorageShell
from services.storage.thread_priority import COPY_NICENESS
from shared import subjects
from shared.codec import Input, decode, decode_input, encode
from shared.errors import InvalidRequest, TransportError
from shared.event_outbox import EventOutbox
from shared.lifecycle import Lifecycle
from shared.memory import DevicePoolView, HostPoolView
from shared.memory.device_pool_view import DevicePages, DeviceRun
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.sharing import OpenPool
from shared.messages.sparse_reads import ReadSparse, SparseRead
from shared.messages.status import GetInventory, Inventory
from shared.messages.storage_events import BackupDone, HostPoolCreated, StorageDraining, StorageJoined, StorageLeft
from shared.messages.storage_plans import (
    AttachDevicePool,
    BackupPages,
    CreateHostPool,
    DetachDevicePool,
    ReleaseStorage,
    StorageOrder,
    StoragePlan,
)
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.unit.storage.sharing.local_engine import LocalEngine

INCARNATION = "storage-1"


class _Scheduler:
    """The other side: publishes numbered plans and reads the events of the stream in order."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self._number = 0
        self._events = bus.follow(subjects.INPUTS_STREAM)

    async def order(self, order: StorageOrder) -> None:
        self._number += 1
        plan = StoragePlan(storage_id="s0", incarnation=INCARNATION, number=self._number, epoch=1, cause=1, order=order)
        await self.bus.publish(subjects.storage_output("s0"), encode(plan))

    async def event(self) -> Input:
        message = await asyncio.wait_for(anext(self._events), 20.0)
        return decode_input(message.data)

    async def backup(self, transfer_id: int, pairs: list[tuple[int, int]], **change: object) -> None:
        device, host = zip(*pairs, strict=True)
        fields = {
            "transfer_id": transfer_id,
            "worker_id": "w0",
            "worker_incarnation": "i0",
            "device_pages": pack_int32(device),
            "host_pages": pack_int32(host),
            "identities": b"".join(bytes([page + 1]) * 16 for page in host),
        } | change
        await self.order(BackupPages(**fields))  # type: ignore[arg-type]

    async def inventory(self) -> Inventory:
        answer = await self.bus.call(subjects.rpc("storage", "inventory", "s0"), encode(GetInventory()))
        return decode(answer, Inventory)


class _Cell:
    """A running storage and its scheduler."""

    def __init__(
        self, scheduler: _Scheduler, storage_bus: MemoryBus, life: Lifecycle, task: asyncio.Task[None]
    ) -> None:
        self.scheduler = scheduler
        self.storage_bus = storage_bus
        self.life = life
        self.task = task

    async def create_pools(self, device: PoolHandle) -> HostPoolView:
        await self.scheduler.order(CreateHostPool(geometry=device.geometry))
        created = await self.scheduler.event()
        assert isinstance(created, HostPoolCreated)
        assert created.handle is not None
        await self.scheduler.order(AttachDevicePool(worker_id="w0", worker_incarnation="i0", handle=device))
        return HostPoolView.attach(created.handle, writable=False)

    async def stop(self) -> None:
        self.life.stop()
        await asyncio.wait_for(self.task, 20.0)


@asynccontextmanager
async def _running(
    broker: MemoryBroker,
    shm_prefix: str,
    *,
    open_device: Callable[[PoolHandle], DevicePages] = DevicePoolView.attach,
    threads: int = 2,
    max_transfers: int = 16,
    **settings: Any,
) -> AsyncIterator[_Cell]:
    config = StorageConfig(
        id="s0",
        node="n0",
        host_kv_bytes=100_000,
        shm_prefix=shm_prefix,
        threads=threads,
        max_transfers=max_transfers,
        disk_read_bytes_per_s=5_000_000,
        **settings,
    )
    bus, life = broker.connect("storage"), Lifecycle()
    scheduler = _Scheduler(broker.connect("scheduler"))
    pools = Pools(shm_prefix, config.host_kv_bytes, open_device=open_device)
    task = asyncio.create_task(StorageShell(config, bus, pools, incarnation=INCARNATION).run(life))
    joined = await scheduler.event()
    assert joined == StorageJoined(
        storage_id="s0",
        incarnation=INCARNATION,
        node="n0",
        host_bytes=100_000,
        disk_bytes_per_s=5e6,
        shares=config.share.replace("off", ""),
        handover_bytes=config.handover_bytes if config.share != "off" and config.handover_ms else 0,
        takes_compact=True,
    )
    cell = _Cell(scheduler, bus, life, task)
    try:
        yield cell
    finally:
        bus.reconnect()
        await cell.stop()


Start = Callable[..., AbstractAsyncContextManager[_Cell]]


@pytest.fixture
def start(broker: MemoryBroker, shm_prefix: str) -> Start:
    return partial(_running, broker, shm_prefix)


@pytest.fixture
def handle(geometry: KvGeometry, make_device_pool: Callable[[KvGeometry, int], PoolHandle]) -> PoolHandle:
    """Of a worker's pool."""
    return make_device_pool(geometry, 6)


class _GatedPool:
    """A device pool whose copies wait for a gate."""

    def __init__(self, handle: PoolHandle) -> None:
        self._view = DevicePoolView.attach(handle)
        self.handle = handle
        self.fault = ""
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.niceness = 0

    def copy_run(self, run: DeviceRun, into: np.ndarray) -> None:
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.entered.set()
        assert self.gate.wait(20.0)
        self._view.copy_run(run, into)

    def close(self) -> bool:
        return self._view.close()


async def test_a_backup_arrives_verified(start: Start, handle: PoolHandle) -> None:
    """Create, attach, back up: another mapping of the host pool then verifies every page."""
    async with start() as cell:
        host = await cell.create_pools(handle)

        await cell.scheduler.backup(7, [(0, 3), (1, 4), (5, 0)])
        done = await cell.scheduler.event()
        inventory = await cell.scheduler.inventory()

    assert isinstance(done, BackupDone)
    assert (done.transfer_id, done.ok, done.error) == (7, True, "")
    source = DevicePoolView.attach(handle)
    for page, target in ((0, 3), (1, 4), (5, 0)):
        for layer in range(handle.geometry.layers):
            host.verify_layer(target, layer, bytes([target + 1]) * 16)
            assert host.pages[target, layer].tobytes() == source.halves[layer, :, page].tobytes()
    assert inventory.last_plan == 3
    assert inventory.pages_total == host.handle.pages
    assert inventory.counters["pages_backed_up"] == 3
    assert inventory.counters["bytes_backed_up"] == 3 * handle.geometry.page_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"worker_id": "w9"}, "no device pool of worker w9"),
        ({"device_pages": pack_int32([99])}, "device pages 99"),
    ],
)
async def test_a_bad_backup_is_answered_and_the_next_good_one_done(
    start: Start, handle: PoolHandle, change: dict[str, object], reason: str
) -> None:
    """No bad plan ends the storage: it says what is wrong and goes on."""
    async with start() as cell:
        await cell.create_pools(handle)

        await cell.scheduler.backup(1, [(0, 0)], **change)
        refused = await cell.scheduler.event()
        await cell.scheduler.backup(2, [(0, 0)])
        done = await cell.scheduler.event()

    assert isinstance(refused, BackupDone)
    assert not refused.ok
    assert reason in refused.error
    assert isinstance(done, BackupDone)
    assert done.ok


async def test_a_storage_answers_calls_for_parts_of_chunks(start: Start) -> None:
    """One without a disk says that it has none of them."""
    call = ReadSparse(
        namespace="0" * 32, depth=0, chunks=bytes(16), layer=0, part="keys", buffer="b", offset=0, nbytes=1
    )
    async with start() as cell:
        data = await cell.scheduler.bus.call(subjects.rpc("storage", "sparse", "s0"), encode(call))

    assert decode(data, SparseRead).code == "service_unavailable"


async def test_orders_before_their_pools_are_answered(start: Start) -> None:
    """A backup with no pools and a pool that cannot be made are errors in the answers."""
    huge = KvGeometry(layers=100, kv_heads=100, head_dim=100, page_size=64, dtype="float32")
    async with start() as cell:
        await cell.scheduler.backup(1, [(0, 0)])
        refused = await cell.scheduler.event()
        await cell.scheduler.order(CreateHostPool(geometry=huge))
        created = await cell.scheduler.event()

    assert isinstance(refused, BackupDone)
    assert not refused.ok
    assert isinstance(created, HostPoolCreated)
    assert created.handle is None
    assert "--host-kv-bytes" in created.error


async def test_detaching_fails_what_waits_and_what_runs(start: Start, handle: PoolHandle) -> None:
    """Each backup of a detached pool is answered once, as failed, and the worker's next pool works."""
    pool = _GatedPool(handle)
    async with start(open_device=lambda _: pool, threads=1) as cell:
        await cell.create_pools(handle)
        await cell.scheduler.backup(1, [(0, 0)])
        await cell.scheduler.backup(2, [(1, 1)])
        await asyncio.to_thread(pool.entered.wait, 20.0)

        await cell.scheduler.order(DetachDevicePool(worker_id="w0", worker_incarnation="i0"))
        waiting = await cell.scheduler.event()
        pool.gate.set()
        running = await cell.scheduler.event()
        await cell.scheduler.order(AttachDevicePool(worker_id="w0", worker_incarnation="i0", handle=handle))
        await cell.scheduler.backup(3, [(2, 2)])
        done = await cell.scheduler.event()

    answers = [event for event in (waiting, running, done) if isinstance(event, BackupDone)]
    assert [(answer.transfer_id, answer.ok) for answer in answers] == [(2, False), (1, False), (3, True)]
    assert "detached" in answers[0].error
    assert "detached" in answers[1].error


async def test_copies_yield_to_everything_else(start: Start, handle: PoolHandle) -> None:
    """The thread that copies has a low priority, and the event loop keeps its own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    pool = _GatedPool(handle)
    pool.gate.set()
    async with start(open_device=lambda _: pool) as cell:
        await cell.create_pools(handle)
        await cell.scheduler.backup(1, [(0, 0)])
        await cell.scheduler.event()

    assert pool.niceness == COPY_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


async def test_backups_beyond_the_bound_are_refused(start: Start, handle: PoolHandle) -> None:
    """The queue is bounded; one too many is answered at once, the others are done."""
    pool = _GatedPool(handle)
    async with start(open_device=lambda _: pool, threads=1, max_transfers=2) as cell:
        await cell.create_pools(handle)
        for number in (1, 2, 3):
            await cell.scheduler.backup(number, [(number, number)])

        refused = await cell.scheduler.event()
        pool.gate.set()
        others = [await cell.scheduler.event(), await cell.scheduler.event()]

    assert isinstance(refused, BackupDone)
    assert (refused.transfer_id, refused.ok) == (3, False)
    assert [event.transfer_id for event in others if isinstance(event, BackupDone) and event.ok] == [1, 2]


async def test_an_outage_of_the_broker_loses_no_answer(start: Start, handle: PoolHandle) -> None:
    """A copy that ends while the broker is away is answered, once, when it is back."""
    pool = _GatedPool(handle)
    async with start(open_device=lambda _: pool) as cell:
        await cell.create_pools(handle)
        await cell.scheduler.backup(1, [(0, 0)])
        await asyncio.to_thread(pool.entered.wait, 20.0)
        cell.storage_bus.disconnect()
        pool.gate.set()
        await cell.scheduler.backup(2, [(1, 1)])

        cell.storage_bus.reconnect()
        answers = [await cell.scheduler.event(), await cell.scheduler.event()]

    assert sorted(event.transfer_id for event in answers if isinstance(event, BackupDone) and event.ok) == [1, 2]


async def test_a_stop_finishes_the_copy_and_leaves_nothing_behind(start: Start, handle: PoolHandle) -> None:
    """The running copy is done, the waiting fail, StorageLeft is the last event, and the pool's name is gone."""
    pool = _GatedPool(handle)
    async with start(open_device=lambda _: pool, threads=1) as cell:
        host = await cell.create_pools(handle)
        await cell.scheduler.backup(1, [(0, 0)])
        await cell.scheduler.backup(2, [(1, 1)])
        await asyncio.to_thread(pool.entered.wait, 20.0)

        cell.life.stop()
        events = [await cell.scheduler.event()]
        pool.gate.set()
        events += [await cell.scheduler.event(), await cell.scheduler.event()]
        await cell.stop()

    answers = [event for event in events if isinstance(event, BackupDone)]
    assert [(answer.transfer_id, answer.ok) for answer in answers] == [(2, False), (1, True)]
    assert events[-1] == StorageLeft(storage_id="s0", incarnation=INCARNATION)
    assert not (SHM_DIRECTORY / host.handle.name).exists()
    host.verify_layer(0, 0, bytes([1]) * 16)


async def test_a_stop_whose_answers_find_no_room_ends_all_the_same(
    start: Start, handle: PoolHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox is full and stays so, because nobody takes anything from it."""
    monkeypatch.setattr("services.storage.shell.LEAVE_S", 0.01)

    async def wait_for_ever(_outbox: EventOutbox, _event: object) -> None:
        await asyncio.Event().wait()

    async with start() as cell:
        host = await cell.create_pools(handle)
        monkeypatch.setattr(EventOutbox, "put_when_room", wait_for_ever)

        await asyncio.wait_for(cell.stop(), 20)

    assert not (SHM_DIRECTORY / host.handle.name).exists()


async def test_a_stop_without_a_broker_ends_all_the_same(
    start: Start, handle: PoolHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nobody can be told, the storage leaves in bounded time and removes its pool."""
    monkeypatch.setattr("services.storage.shell.FLUSH_S", 0.01)
    async with start() as cell:
        host = await cell.create_pools(handle)
        cell.storage_bus.disconnect()

        await cell.stop()

    assert not (SHM_DIRECTORY / host.handle.name).exists()


@pytest.fixture
def local_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages share within this process."""
    monkeypatch.setattr(parts, "NixlEngine", lambda name: LocalEngine())


@pytest.mark.usefixtures("local_sharing")
async def test_a_storage_that_shares_waits_until_it_is_let_go(start: Start, geometry: KvGeometry) -> None:
    """It says how long it can, and carries on with orders meanwhile."""
    async with start(share="nixl", handover_ms=20_000) as cell:
        cell.life.signalled()
        told = await cell.scheduler.event()
        assert told == StorageDraining(storage_id="s0", incarnation=INCARNATION, grace_ms=18_000)
        await cell.scheduler.order(CreateHostPool(geometry=geometry))
        assert isinstance(await cell.scheduler.event(), HostPoolCreated)

        await cell.scheduler.order(ReleaseStorage())

        assert await cell.scheduler.event() == StorageLeft(storage_id="s0", incarnation=INCARNATION)


async def test_a_storage_whose_engine_starts_at_the_second_try_shares(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins when that is known, and says that it shares."""
    engines: list[str] = []

    def flaky(name: str) -> LocalEngine:
        engines.append(name)
        if len(engines) == 1:
            raise TransportError("NIXL does not start")
        return LocalEngine()

    monkeypatch.setattr(parts, "NixlEngine", flaky)
    monkeypatch.setattr(parts, "_START_PAUSE_S", 0.0)
    async with start(share="nixl", handover_ms=0) as cell:
        call = OpenPool(engine="nixl", incarnation="another")
        with pytest.raises(InvalidRequest, match="this incarnation has ended"):
            await cell.scheduler.bus.call(subjects.rpc("storage", "pool", "s0"), encode(call))

    assert len(engines) == 2


@pytest.mark.usefixtures("local_sharing")
@pytest.mark.parametrize("how", ["no time is given", "nothing may be copied", "its time is over", "a second signal"])
async def test_a_storage_does_not_wait_for_ever(start: Start, how: str) -> None:
    """Whether the scheduler answers or not."""
    settings: dict[str, Any] = {"handover_ms": {"no time is given": 0, "its time is over": 1}.get(how, 30_000)}
    settings["handover_bytes"] = 0 if how == "nothing may be copied" else 1 << 30
    async with start(share="nixl", **settings) as cell:
        cell.life.signalled()
        if how in ("its time is over", "a second signal"):
            assert isinstance(await cell.scheduler.event(), StorageDraining)
        if how == "a second signal":
            cell.life.signalled()

        assert await cell.scheduler.event() == StorageLeft(storage_id="s0", incarnation=INCARNATION)
