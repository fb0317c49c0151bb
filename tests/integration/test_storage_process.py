"""Storages as processes, with a real broker: killed, without a broker, told to end, given up; and what comes after."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared import subjects
from shared.bus import nats_bus
from shared.bus.protocol import StreamLimits
from shared.codec import encode
from shared.ids import split_digests
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.status import CellStatus
from shared.messages.storage_events import ChunksListed, StorageJoined, StorageLeft
from tests.conformance.object_stores import S3Place
from tests.integration.storage_cell import GEOMETRY, TIMEOUT_S, Sequence, StorageCell, make_pools
from tests.nats_server import NatsServer
from tests.present import present

pytestmark = pytest.mark.integration


@pytest.fixture
async def cell(nats_server: NatsServer) -> AsyncIterator[StorageCell]:
    """The scheduler's side; no storage has been started yet."""
    bus = await nats_bus.connect([nats_server.url], "scheduler")
    await bus.ensure_streams(StreamLimits(max_bytes=64 * 2**20))
    made = StorageCell(bus, GEOMETRY)
    await made.answer_standing()
    yield made
    await bus.close()


@asynccontextmanager
async def storage(url: str, prefix: str, *flags: str) -> AsyncIterator[Process]:
    """A process, certainly dead at the end."""
    common = ["--nats", url, "--id", "s0", "--node", "n0", "--shm-prefix", prefix, "--host-kv-bytes", "4MiB"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.storage", *common, *flags)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def joined(cell: StorageCell, prefix: str) -> str:
    """Wait until a storage has joined and has pools; the name of its segment."""
    cell.begin_incarnation()
    cell.joined = await cell.event(StorageJoined)
    await make_pools(cell, prefix)
    return present(cell.host).handle.name


async def test_a_killed_storage_is_cleaned_up_after_and_warm_again(
    nats_server: NatsServer, cell: StorageCell, prefix: str, tmp_path: Path
) -> None:
    """After SIGKILL its segment stays until the next start, which joins with its budget and a pool of its own and lists
    what was saved. Pages travel from one process's pool to another's; SIGTERM ends with StorageLeft, exit code 0, no
    segment.
    """
    sequence, pages = Sequence.make(1, 2), list(range(8))
    disk = ("--disk-dir", str(tmp_path), "--disk-kv-bytes", "8MiB")
    async with storage(nats_server.url, prefix, *disk):
        killed = await joined(cell, prefix)
        first, survivor = present(cell.joined), present(cell.host)
        saved = await cell.save(sequence, device=pages)
    was_left = (SHM_DIRECTORY / killed).exists()
    async with storage(nats_server.url, prefix, *disk) as process:
        segment = await joined(cell, prefix)
        second = present(cell.joined)
        are_there = [(SHM_DIRECTORY / name).exists() for name in (killed, segment)]
        listed = await cell.event(ChunksListed)
        fetched = await cell.fetch(sequence, pages)
        done = await cell.backup(sequence, [26, 27], [16, 17])
        are_equal = cell.holds(sequence, pages, pages, pages), cell.holds(sequence, [0, 1], [16, 17], [26, 27])
        process.terminate()
        left = await cell.event(StorageLeft)
        exit_code = await asyncio.wait_for(process.wait(), TIMEOUT_S)

    assert (was_left, are_there) == (True, [False, True])
    assert second.incarnation != first.incarnation
    survivor.pages[0] = 1
    assert (survivor.pages[0] == 1).all()
    assert second.disk_bytes == 8 * 2**20
    assert saved.chunks == b"".join(sequence.names)
    assert sorted(split_digests(listed.chunks)) == sorted(sequence.names)
    assert (fetched.chunks, done.ok, are_equal) == (2, True, (True, True))
    assert (left, exit_code) == (StorageLeft(storage_id="s0", incarnation=second.incarnation), 0)
    assert not (SHM_DIRECTORY / segment).exists()


async def test_what_a_killed_storage_had_not_uploaded_is_uploaded_by_the_next(
    nats_server: NatsServer, cell: StorageCell, prefix: str, tmp_path: Path
) -> None:
    """With a store that answers nothing until the first of them is gone."""
    sequence, place = Sequence.make(1, 4), S3Place()
    flags = ("--disk-dir", str(tmp_path), "--disk-kv-bytes", "8MiB", "--remote", place.config().remote)
    backend = place.open()
    with place.environment():
        place.proxy.always = "503"
        async with storage(nats_server.url, prefix, *flags):
            await joined(cell, prefix)
            saved = await cell.save(sequence, device=list(range(16)))
        place.proxy.always = ""
        before = list(backend.entries())
        async with storage(nats_server.url, prefix, *flags):
            await joined(cell, prefix)
            await cell.uploaded(4)
    uploaded = [entry.key.identity for entry in backend.entries()]
    backend.close()
    place.close()

    assert saved.chunks == b"".join(sequence.names)
    assert before == []
    assert sorted(uploaded) == sorted(sequence.names)


async def test_a_storage_outlives_its_broker_and_sighup_and_ends_once_it_was_given_up(
    nats_server: NatsServer, cell: StorageCell, prefix: str
) -> None:
    """It hears the next plan when the broker has died and come back, and carries out orders after SIGHUP; once the
    cell's status lists it no more, it ends with exit code 1.
    """
    sequence, cell.may_lose_its_broker = Sequence.make(1, 1), True
    async with storage(nats_server.url, prefix) as process:
        await joined(cell, prefix)
        nats_server.kill()
        nats_server.start()
        after_outage = await cell.backup(sequence, [0], [0])
        process.send_signal(signal.SIGHUP)
        after_sighup = await cell.backup(sequence, [1], [1])
        for storages in ({"s0": present(cell.joined).incarnation}, {}):
            status = CellStatus(
                scheduler_id="s", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1,
                max_context=1, storage_incarnations=storages,
            )  # fmt: skip
            await cell.bus.publish(subjects.STATUS, encode(status))
        exit_code = await asyncio.wait_for(process.wait(), TIMEOUT_S)

    assert (after_outage.ok, after_sighup.ok, exit_code) == (True, True, 1)
