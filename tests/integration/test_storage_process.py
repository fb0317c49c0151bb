"""A storage as a process, with a real broker: it joins, backs up, leaves in order, and is cleaned up after."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from shared import subjects
from shared.bus import nats_bus
from shared.bus.protocol import Bus, StreamLimits
from shared.codec import Input, decode_input, encode
from shared.errors import Unavailable
from shared.memory import HostPoolView, SharedSegment, unlink_all
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.status import CellStatus
from shared.messages.storage_events import BackupDone, HostPoolCreated, StorageJoined, StorageLeft
from shared.messages.storage_plans import AttachDevicePool, BackupPages, CreateHostPool, StorageOrder, StoragePlan
from tests.nats_server import NatsServer
from tests.run_name import RUN

pytestmark = pytest.mark.integration

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=16, page_size=16, dtype="float32")
PREFIX = f"{RUN}-{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    unlink_all(PREFIX)


@asynccontextmanager
async def _storage(url: str) -> AsyncIterator[Process]:
    flags = ["--nats", url, "--id", "s0", "--node", "n0", "--shm-prefix", PREFIX, "--host-kv-bytes", "4MiB"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.storage", *flags)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Scheduler:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._events = bus.follow(subjects.INPUTS_STREAM)
        self._number = 0
        self.incarnation = ""

    async def event(self) -> Input:
        async with asyncio.timeout(60.0):
            event = decode_input((await anext(self._events)).data)
        if isinstance(event, StorageJoined):
            self.incarnation, self._number = event.incarnation, 0
        return event

    async def order(self, order: StorageOrder) -> None:
        self._number += 1
        plan = StoragePlan(
            storage_id="s0", incarnation=self.incarnation, number=self._number, epoch=1, cause=1, order=order
        )
        # Acknowledged, because a core publish into a connection that has just died is lost.
        for _ in range(100):
            try:
                await self._bus.append(
                    subjects.storage_output("s0"), encode(plan), message_id=f"{self.incarnation}.{self._number}"
                )
                return
            except Unavailable:
                await asyncio.sleep(0.1)
        raise AssertionError("the broker did not come back")

    async def create_host_pool(self) -> PoolHandle:
        await self.order(CreateHostPool(geometry=GEOMETRY))
        created = await self.event()
        assert isinstance(created, HostPoolCreated)
        assert created.handle is not None, created.error
        return created.handle


@pytest.fixture
async def scheduler(nats_server: NatsServer) -> AsyncIterator[_Scheduler]:
    bus = await nats_bus.connect([nats_server.url], "scheduler")
    await bus.ensure_streams(StreamLimits(max_bytes=64 * 2**20))
    yield _Scheduler(bus)
    await bus.close()


async def test_backup_then_sigterm(nats_server: NatsServer, scheduler: _Scheduler) -> None:
    """Pages travel from one process's pool to another's; SIGTERM ends with StorageLeft, exit code 0, no files."""
    device = SharedSegment.create(PREFIX, "device", 8 * GEOMETRY.page_bytes)
    device.array[:] = np.random.default_rng(0).integers(0, 256, device.nbytes, dtype=np.uint8)
    worker_pool = PoolHandle(
        kind="shm", layout="layer_first", name=device.name, nbytes=device.nbytes, pages=8, geometry=GEOMETRY
    )
    identity = b"i" * 16
    async with _storage(nats_server.url) as process:
        joined = await scheduler.event()
        handle = await scheduler.create_host_pool()
        host = HostPoolView.attach(handle, writable=False)
        await scheduler.order(AttachDevicePool(worker_id="w0", worker_incarnation="i0", handle=worker_pool))
        await scheduler.order(
            BackupPages(
                transfer_id=5,
                worker_id="w0",
                worker_incarnation="i0",
                device_pages=pack_int32([6]),
                host_pages=pack_int32([2]),
                identities=identity,
            )
        )
        done = await scheduler.event()
        process.send_signal(signal.SIGTERM)
        left = await scheduler.event()
        exit_code = await asyncio.wait_for(process.wait(), 60.0)

    assert isinstance(joined, StorageJoined)
    assert isinstance(done, BackupDone)
    assert (done.transfer_id, done.ok) == (5, True)
    halves = device.array.reshape(GEOMETRY.layers, 2, 8, GEOMETRY.half_bytes)
    for layer in range(GEOMETRY.layers):
        host.verify_layer(2, layer, identity)
        assert host.pages[2, layer].tobytes() == halves[layer, :, 6].tobytes()
    assert left == StorageLeft(storage_id="s0", incarnation=joined.incarnation)
    assert exit_code == 0
    assert not (SHM_DIRECTORY / handle.name).exists()


async def test_a_killed_storage_is_cleaned_up_by_the_next(nats_server: NatsServer, scheduler: _Scheduler) -> None:
    """After SIGKILL the file stays until the next start; that is a new incarnation with an empty pool of its own."""
    async with _storage(nats_server.url) as first:
        joined = await scheduler.event()
        killed_handle = await scheduler.create_host_pool()
        survivor = HostPoolView.attach(killed_handle)
        os.kill(first.pid, signal.SIGKILL)
        await first.wait()
    was_left = (SHM_DIRECTORY / killed_handle.name).exists()

    async with _storage(nats_server.url):
        rejoined = await scheduler.event()
        handle = await scheduler.create_host_pool()

        assert was_left
        assert not (SHM_DIRECTORY / killed_handle.name).exists()
        assert (SHM_DIRECTORY / handle.name).exists()
        assert isinstance(joined, StorageJoined)
        assert isinstance(rejoined, StorageJoined)
        assert rejoined.incarnation != joined.incarnation
        survivor.pages[0] = 1
        assert (survivor.pages[0] == 1).all()


async def test_a_killed_broker_is_survived(nats_server: NatsServer, scheduler: _Scheduler) -> None:
    """After the broker died and came back, the same storage hears the next plan and answers it."""
    async with _storage(nats_server.url):
        await scheduler.event()
        await scheduler.create_host_pool()
        nats_server.kill()
        nats_server.start()

        await scheduler.order(
            BackupPages(
                transfer_id=9,
                worker_id="w0",
                worker_incarnation="i0",
                device_pages=pack_int32([0]),
                host_pages=pack_int32([0]),
                identities=b"i" * 16,
            )
        )
        answer = await scheduler.event()

    assert isinstance(answer, BackupDone)
    assert (answer.transfer_id, answer.ok) == (9, False)
    assert "no device pool" in answer.error


async def test_sighup_ends_nothing_and_a_storage_that_was_given_up_ends(nats_server: NatsServer) -> None:
    """After SIGHUP it still carries out orders; once the cell's status lists it no more, it ends with exit code 1."""
    bus = await nats_bus.connect([nats_server.url], "scheduler")
    await bus.ensure_streams(StreamLimits(max_bytes=64 * 2**20))
    scheduler = _Scheduler(bus)
    async with _storage(nats_server.url) as process:
        await scheduler.event()
        process.send_signal(signal.SIGHUP)
        handle = await scheduler.create_host_pool()
        listed = {"s0": scheduler.incarnation}
        for storages in (listed, {}):
            status = CellStatus(
                scheduler_id="s", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1,
                max_context=1, storage_incarnations=storages,
            )  # fmt: skip
            await bus.publish(subjects.STATUS, encode(status))
        async with asyncio.timeout(60.0):
            exit_code = await process.wait()
    await bus.close()

    assert handle.pages > 0
    assert exit_code == 1
