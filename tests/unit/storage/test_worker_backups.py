"""Backups that a worker copies, through a whole storage: what the scheduler hears, and what other processes read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from services.storage import shell as storage_shell
from services.storage import worker_backups, worker_stores
from services.storage.config import StorageConfig
from services.storage.core.backup_check import Transfer
from services.storage.pools import Pools, open_device_pool
from services.storage.shell import StorageShell
from services.storage.worker_backups import WorkerBackups
from services.storage.worker_stores import WorkerStores
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_stores import HostStores
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.movers.gpu_assisted import GpuAssistedMover
from services.worker.store_calls import StoreCalls
from shared import subjects
from shared.codec import decode, decode_input, encode
from shared.errors import TransportError
from shared.lifecycle import Lifecycle
from shared.memory import HostPoolView
from shared.memory.device_pool_view import DevicePages
from shared.memory.life import LifeSign
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.page_stores import PagesStored, StorePages
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_events import BackupDone, HostPoolCreated
from shared.messages.storage_plans import (
    AttachDevicePool,
    BackupPages,
    CreateHostPool,
    DetachDevicePool,
    StorageOrder,
    StoragePlan,
)
from tests.cuda.late_streams import late_streams
from tests.memory_bus import MemoryBroker

PAGES = 8


class Worker:
    """Copies as a worker does, when ``may_copy`` is set; says what ``says`` says. ``seen`` are its calls."""

    def __init__(self, device: DevicePool) -> None:
        self.device = device
        self.host: HostPoolView | None = None
        self.says: Callable[[StorePages], PagesStored | None] = lambda _: PagesStored()
        self.may_copy, self.asked = asyncio.Event(), asyncio.Event()
        self.may_copy.set()
        self.seen: list[StorePages] = []
        self.sealed: list[int] = []  # Host pages with an identity when the worker was asked to write them.

    async def answer(self, data: bytes) -> bytes:
        """Handle a call. ``says`` None is an error in the middle of the copy."""
        call = decode(data, StorePages)
        said = self.says(call)
        if not call.device_pages:
            assert said is not None
            return encode(said)
        self.seen.append(call)
        self.asked.set()
        assert self.host is not None
        assert call.pool == self.host.handle.name
        pages = unpack_int32(call.host_pages)
        self.sealed += [page for page in pages if self.host.identities[page].any()]
        await self.may_copy.wait()
        if said == PagesStored():
            rows = self.device.memory().host_rows()
            for page, host_page in zip(unpack_int32(call.device_pages), pages, strict=True):
                self.host.pages[host_page] = rows[page].reshape(self.host.pages[host_page].shape)
        if said is None:
            raise RuntimeError("it stops in the middle of it")
        return encode(said)


class Cell:
    def __init__(self, broker: MemoryBroker, device: DevicePool) -> None:
        self.bus = broker.connect("scheduler")
        self.worker = Worker(device)
        self.device = device
        self._events = self.bus.follow(subjects.INPUTS_STREAM)
        self._number = 0

    async def order(self, order: StorageOrder) -> None:
        self._number += 1
        plan = StoragePlan(storage_id="s0", incarnation="si", number=self._number, epoch=1, cause=1, order=order)
        await self.bus.publish(subjects.storage_output("s0"), encode(plan))

    async def event(self) -> Any:
        return decode_input((await asyncio.wait_for(anext(self._events), 20)).data)

    async def backup(self, transfer_id: int, device: list[int], host: list[int], worker_id: str = "w0") -> None:
        identities = b"".join(bytes([page + 1]) * 16 for page in host)
        await self.order(
            BackupPages(
                transfer_id=transfer_id, worker_id=worker_id, worker_incarnation="i0", device_pages=pack_int32(device),
                host_pages=pack_int32(host), identities=identities,
            )
        )  # fmt: skip

    def check(self, device: list[int], host: list[int]) -> None:
        """These host pages are sealed and hold the device's bytes."""
        assert self.worker.host is not None
        rows = self.device.memory().host_rows()
        for page, host_page in zip(device, host, strict=True):
            for layer in range(self.worker.host.geometry.layers):
                self.worker.host.verify_layer(host_page, layer, bytes([host_page + 1]) * 16)
                assert self.worker.host.pages[host_page, layer].tobytes() == rows[page, layer].tobytes()


@pytest.fixture
def device(geometry: KvGeometry, shm_prefix: str) -> Any:
    pool = DevicePool.create(geometry, PAGES, device="cpu", shm_prefix=shm_prefix)
    halves = pool.bytes_view()
    halves[...] = np.random.default_rng(4).integers(0, 256, halves.shape, dtype=np.uint8)
    yield pool
    pool.close()


@asynccontextmanager
async def running(
    broker: MemoryBroker,
    prefix: str,
    device: DevicePool,
    *,
    threads: int = 2,
    share: float = 1.0,
    open_device: Callable[[PoolHandle], DevicePages] = open_device_pool,
    kind: Literal["shm", "cuda_ipc"] = "shm",
) -> AsyncIterator[Cell]:
    """``open_device`` maps the pools, of which the storage is told that they are of this ``kind``."""
    config = StorageConfig(id="s0", node="n0", host_kv_bytes=100_000, shm_prefix=prefix, threads=threads)
    life, cell = Lifecycle(), Cell(broker, device)
    pools = Pools(prefix, config.host_kv_bytes, backup_share=share, open_device=open_device)
    serving = asyncio.create_task(
        StorageShell(config, broker.connect("storage"), pools, incarnation="si").run(life)
    )  # fmt: skip
    try:
        await cell.event()
        await broker.connect("worker").serve(
            subjects.rpc("worker", "store", "w0"), lambda data: cell.worker.answer(data), at_once=8
        )
        await cell.order(CreateHostPool(geometry=device.geometry))
        created = await cell.event()
        assert isinstance(created, HostPoolCreated)
        assert created.handle is not None
        cell.worker.host = HostPoolView.attach(created.handle)
        for worker_id in ("w0", "w1"):
            handle = msgspec.structs.replace(device.handle(), kind=kind)
            await cell.order(AttachDevicePool(worker_id=worker_id, worker_incarnation="i0", handle=handle))
        yield cell
    finally:
        life.stop()
        await asyncio.wait_for(serving, 20)


Start = Callable[..., AbstractAsyncContextManager[Cell]]


@pytest.fixture
def start(broker: MemoryBroker, shm_prefix: str, device: DevicePool) -> Start:
    return partial(running, broker, shm_prefix, device)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, geometry: KvGeometry) -> None:
    """Workers with pools in shared memory are asked, too, and parts are two pages."""
    monkeypatch.setattr(
        storage_shell, "WorkerBackups", partial(WorkerBackups, part_bytes=2 * geometry.page_bytes)
    )  # fmt: skip
    monkeypatch.setattr(storage_shell, "WorkerStores", partial(WorkerStores, kinds=("shm", "cuda_ipc"), answer_s=20))
    assert 2 * geometry.page_bytes < worker_backups.PART_BYTES


@pytest.mark.parametrize("share", [1.0, 0.9])
async def test_the_worker_copies_in_parts_and_the_storage_seals(start: Start, share: float) -> None:
    """No page has an identity while the worker writes it, be it that of what was there before. A bounded share of the
    time changes none of it.
    """
    async with start(share=share) as cell:
        await cell.backup(1, [0, 1, 2, 3, 4], [5, 3, 1, 0, 7])
        done = await cell.event()
        await cell.backup(2, [6, 5], [5, 3])
        again = await cell.event()

    assert [(each.transfer_id, each.ok) for each in (done, again)] == [(1, True), (2, True)]
    cell.check([6, 5, 2, 3, 4], [5, 3, 1, 0, 7])
    assert cell.worker.sealed == []
    assert [(call.transfer_id, call.part, len(unpack_int32(call.host_pages))) for call in cell.worker.seen] == [
        (1, 0, 2), (1, 1, 2), (1, 2, 1), (2, 0, 2),
    ]  # fmt: skip


async def test_a_worker_that_refuses_is_copied_from(start: Start) -> None:
    """From the start, or in the middle of a backup."""
    async with start() as cell:
        cell.worker.says = lambda call: PagesStored(refused="not now" if call.part == 1 else "")
        await cell.backup(1, [0, 1, 2], [5, 3, 1])
        middle = await cell.event()
        await cell.backup(2, [3], [0])
        later = await cell.event()
        await cell.backup(3, [4], [7], worker_id="w1")  # Which serves no such calls.
        other = await cell.event()

    assert [(each.transfer_id, each.ok) for each in (middle, later, other)] == [(1, True), (2, True), (3, True)]
    cell.check([0, 1, 2, 3, 4], [5, 3, 1, 0, 7])
    assert [call.part for call in cell.worker.seen] == [0, 1]


async def test_a_pool_that_the_storage_cannot_map_is_backed_up_by_its_worker(start: Start) -> None:
    """As long as the worker does it; then the reason is the mapping's."""

    def refuse(_: PoolHandle) -> DevicePages:
        raise TransportError("CUDA IPC is not permitted")

    async with start(open_device=refuse, kind="cuda_ipc") as cell:
        await cell.backup(1, [0, 1, 2], [5, 3, 1])
        done = await cell.event()
        await cell.backup(2, [0], [7], worker_id="w1")
        unmapped = await cell.event()

    assert (done.transfer_id, done.ok) == (1, True)
    cell.check([0, 1, 2], [5, 3, 1])
    assert (unmapped.transfer_id, unmapped.ok) == (2, False)
    assert "CUDA IPC is not permitted" in unmapped.error


async def test_a_copy_that_fails_leaves_its_pages_unsealed(start: Start) -> None:
    """The scheduler hears why, and the next backup is tried."""
    async with start() as cell:
        cell.worker.says = lambda call: PagesStored(error="out of memory" if call.device_pages else "")
        await cell.backup(1, [0], [5])
        failed = await cell.event()
        assert cell.worker.host is not None
        assert not cell.worker.host.identities[5].any()
        cell.worker.says = lambda _: PagesStored()
        await cell.backup(2, [0], [5])
        done = await cell.event()

    assert isinstance(failed, BackupDone)
    assert not failed.ok
    assert "worker w0 could not copy: out of memory" in failed.error
    assert done.ok
    cell.check([0], [5])


async def test_a_backup_has_not_ended_while_a_part_of_it_is_sealed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a later part failed: another backup into these pages would get the identities of this one."""
    seal, may_seal, sealed = worker_backups._seal, threading.Event(), list[slice]()

    def slow_seal(target: HostPoolView, transfer: Transfer, part: slice) -> None:
        assert may_seal.wait(20)
        seal(target, transfer, part)
        sealed.append(part)

    monkeypatch.setattr(worker_backups, "_seal", slow_seal)
    async with start() as cell:
        cell.worker.says = lambda call: PagesStored(error="out of memory" if call.part else "")
        await cell.backup(1, [0, 1, 2], [5, 3, 1])
        while len(cell.worker.seen) < 2:
            await asyncio.sleep(0)
        await cell.backup(2, [4], [7], worker_id="w1")
        other = await cell.event()
        assert (other.transfer_id, other.ok, sealed) == (2, True, [])
        may_seal.set()
        failed = await cell.event()

    assert (failed.transfer_id, failed.ok, len(sealed)) == (1, False, 1)


async def test_pages_in_doubt_are_given_to_nobody_and_hold_up_nobody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup of a worker that went silent is answered when it answers; meanwhile its other pages are copied by the
    storage, on the only thread that there is.
    """
    monkeypatch.setattr(worker_stores, "ASK_AGAIN_S", 0)
    async with start(threads=1) as cell:
        cell.worker.says = lambda call: None if call.device_pages else PagesStored()
        await cell.backup(1, [0], [5])
        await asyncio.wait_for(cell.worker.asked.wait(), 20)
        await cell.backup(2, [1], [3])
        other = await cell.event()
        assert (other.transfer_id, other.ok) == (2, True)

        cell.worker.says = lambda _: PagesStored()
        doubtful = await cell.event()

    assert (doubtful.transfer_id, doubtful.ok) == (1, False)
    assert "did not answer" in doubtful.error
    cell.check([1], [3])
    assert cell.worker.host is not None
    assert not cell.worker.host.identities[5].any()


async def test_a_worker_that_dies_in_a_backup_ends_it(
    start: Start, shm_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sign of life goes out, and the pages are free again."""
    monkeypatch.setattr(worker_stores, "ASK_AGAIN_S", 0)
    monkeypatch.setattr(worker_stores, "ENDING_S", 0)
    sign = LifeSign.show(shm_prefix, "worker", "w0", "i0")
    async with start() as cell:
        cell.worker.says = lambda call: None if call.device_pages else PagesStored()
        await cell.backup(1, [0], [5])
        while len(cell.worker.seen) < 3:
            await asyncio.sleep(0.01)
        sign.end()
        failed = await cell.event()

    assert (failed.transfer_id, failed.ok) == (1, False)


async def test_detaching_waits_for_a_worker_that_copies(start: Start) -> None:
    """The backup is answered as failed, but not before the worker's last byte."""
    async with start() as cell:
        cell.worker.may_copy.clear()
        await cell.backup(1, [0], [5])
        await asyncio.wait_for(cell.worker.asked.wait(), 20)
        await cell.order(DetachDevicePool(worker_id="w0", worker_incarnation="i0"))
        await cell.backup(2, [1], [3])
        refused = await cell.event()
        cell.worker.may_copy.set()
        failed = await cell.event()

    assert [(each.transfer_id, each.ok) for each in (refused, failed)] == [(2, False), (1, False)]
    assert "detached" in failed.error


class Unhindered:
    """Satisfies ``Pins``: everything may be written already."""

    def start(self, work: Callable[[], None]) -> None:
        work()

    def finish(self) -> None: ...

    def pin(self, array: np.ndarray) -> None: ...

    def unpin(self, array: np.ndarray) -> None: ...


async def test_a_real_worker_copies_for_a_real_storage(start: Start, device: DevicePool) -> None:
    """Its mover's streams are late: what the storage seals has arrived."""
    with late_streams():
        stores = HostStores(GpuAssistedMover(device), PAGES)
    async with start() as cell:
        assert cell.worker.host is not None
        loads = Loads(
            device.geometry, PAGES, BatchedMover(device), timeout_s=60, clock_ns=lambda: 7,
            submit=lambda work: work(), pins=Unhindered(), stores=stores,
        )  # fmt: skip
        loads.attach("s0", cell.worker.host.handle)
        calls = StoreCalls("i0", loads.pools, stores)
        asked: list[StorePages] = []

        async def answer(data: bytes) -> bytes:
            asked.append(decode(data, StorePages))
            with late_streams():
                return await calls.answer(data)

        cell.worker.answer = answer  # type: ignore[method-assign]
        await cell.backup(1, [0, 4, 2, 6, 7], [5, 3, 1, 0, 7])
        done = await cell.event()
        cell.check([0, 4, 2, 6, 7], [5, 3, 1, 0, 7])
        await asyncio.to_thread(loads.close)

    assert done.ok
    assert [call.part for call in asked] == [0, 0, 1, 2]
