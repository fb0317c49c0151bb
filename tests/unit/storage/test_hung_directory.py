"""A directory that hangs: it holds its own threads and buffers, and nobody else's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from services.storage import disk_tier
from services.storage.backends import disk
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from services.storage.backends.opening import Heard, open_in_time
from services.storage.buffers import Buffers
from services.storage.chunk_keys import NoCipher
from services.storage.chunk_reading import VerifiedRead
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.staging import Staging
from services.storage.tier_watch import TierWatch
from services.storage.warm_start import WarmStart
from shared.errors import TransportError
from tests.chunk_makers import SMALL, aligned, make_chain
from tests.disk_node import Told

READ = VerifiedRead(SMALL, NoCipher(), "")
CHAIN = make_chain(16, seed=1)
NBYTES = CHAIN[0].blob.nbytes
DEPTH = 4


class Hanging(FileCalls):
    """Calls for paths that begin with ``hung`` wait until ``gate`` is set."""

    def __init__(self) -> None:
        self.hung = ""
        self.gate = threading.Event()
        self.held = threading.Semaphore(0)

    def _wait(self, path: str) -> None:
        if self.hung and path.startswith(self.hung):
            self.held.release()
            assert self.gate.wait(60.0)

    def open(self, path: str, flags: int) -> int:
        self._wait(path)
        return super().open(path, flags)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._wait(os.readlink(f"/proc/self/fd/{fd}"))
        return super().read(fd, into, offset)

    def make_directory(self, path: str) -> None:
        self._wait(path)
        super().make_directory(path)


@pytest.fixture
def calls() -> Iterator[Hanging]:
    """None of its calls hangs after the test."""
    hanging = Hanging()
    yield hanging
    hanging.gate.set()


async def _filled(backend: DiskBackend) -> DiskTier:
    """A disk of ``CHAIN``: even places lie in the first directory, odd ones in the second."""
    tier = DiskTier(backend, 2**20, IoThreads(DEPTH))
    for place, chunk in enumerate(CHAIN):
        above = CHAIN[place - 1].key if place else None
        assert (await tier.write(Arrival(chunk.key, NBYTES, place, above), chunk.blob)).outcome == "stored"
    return tier


def aligned_copy(blob: memoryview) -> memoryview:
    """The same bytes in another buffer: the first is in use."""
    copy = aligned(blob.nbytes)
    copy[:] = blob
    return copy


async def _held(calls: Hanging, count: int) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(calls.held.acquire, True, 20.0)


async def test_a_hung_directory_holds_no_thread_of_another(paths: list[str], calls: Hanging) -> None:
    """However many of its chunks are asked for, those of the other one are read and written meanwhile."""
    backend = DiskBackend(paths, calls=calls)
    tier = await _filled(backend)
    calls.hung = paths[0]
    stuck = [asyncio.create_task(tier.read(chunk.key, READ, aligned(NBYTES))) for chunk in CHAIN[::2]]
    await _held(calls, DEPTH // 2)

    found = [await tier.read(chunk.key, READ, aligned(NBYTES)) for chunk in CHAIN[1::2]]
    more = make_chain(2, seed=2)[1]
    written = await tier.write(Arrival(more.key, NBYTES, 1, None), more.blob)

    assert all(found)
    assert written.outcome == "stored"
    assert not any(task.done() for task in stuck)
    calls.gate.set()
    assert all(await asyncio.gather(*stuck))
    backend.close()


async def test_who_is_cut_off_does_not_wait_for_a_hung_directory(paths: list[str], calls: Hanging) -> None:
    """A fetch past its deadline goes on at once; the buffer is nobody's until the thread is done with it."""
    backend = DiskBackend(paths, calls=calls)
    tier = await _filled(backend)
    buffers = Buffers(Staging(2 * NBYTES, NBYTES), tier.directories.abandoned)
    calls.hung = paths[0]

    async def read() -> None:
        async with buffers.buffer(is_urgent=True) as buffer:
            await tier.read(CHAIN[0].key, READ, buffer)

    reading = asyncio.create_task(read())
    await _held(calls, 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    taken = buffers.taken
    calls.gate.set()
    async with buffers.buffer(is_urgent=True), buffers.buffer(is_urgent=True):
        pass  # Both come free.

    assert taken == 1
    assert buffers.taken == 0
    backend.close()


async def test_a_write_that_hangs_fails_and_the_next_goes_elsewhere(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits no longer than a write may take; what it was to write is not there, and can be written anew."""
    backend = DiskBackend(paths, calls=calls)
    tier = await _filled(backend)
    (chunk,) = make_chain(1, seed=2)
    calls.hung = paths[0]
    monkeypatch.setattr(disk_tier, "WRITE_TIMEOUT_S", 0.01)
    hung = await tier.write(Arrival(chunk.key, NBYTES, 0, None), chunk.blob)
    monkeypatch.setattr(disk_tier, "WRITE_TIMEOUT_S", 30.0)
    tier.works()
    again = await tier.write(Arrival(chunk.key, NBYTES, 0, None), aligned_copy(chunk.blob))

    assert (hung.outcome, chunk.key in tier, again.outcome) == ("failed", True, "stored")
    assert list(backend.left_out) == [paths[0]]
    assert backend.place_of(chunk.key)[0] == paths[1]
    calls.gate.set()
    backend.close()


async def test_a_directory_that_does_not_answer_is_left_out_until_it_does(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are away, what waits for it fails, it is told; looking after it holds nobody up, and it comes back."""
    monkeypatch.setattr(disk_tier, "READ_TIMEOUT_S", 0.01)
    monkeypatch.setattr("services.storage.tier_watch.ERRAND_S", 0.01)
    backend = DiskBackend(paths, calls=calls)
    tier, told = await _filled(backend), Told()
    start = WarmStart(tier, told)  # type: ignore[arg-type]
    start.is_over.set()
    watch = TierWatch(tier, start, None, told)  # type: ignore[arg-type]
    calls.hung = paths[0]
    failures = await asyncio.gather(
        *(tier.read(chunk.key, READ, aligned(NBYTES)) for chunk in CHAIN[::2]), return_exceptions=True
    )
    monkeypatch.setattr(disk_tier, "READ_TIMEOUT_S", 10.0)
    await watch.look()
    await watch.look()  # The directory is tried, and hangs.
    faults, used = list(watch.faults()), tier.index.used
    others = [await tier.read(chunk.key, READ, aligned(NBYTES)) for chunk in CHAIN[1::2]]
    calls.gate.set()
    while not start.is_known(paths[0]):
        await watch.look()
    again = [await tier.read(chunk.key, READ, aligned(NBYTES)) for chunk in CHAIN]

    assert all(isinstance(failure, TransportError) for failure in failures)
    assert [(what, setting) for what, _, setting in faults] == [("disk", "--disk-dir")]
    assert used == len(CHAIN) * NBYTES
    assert all(others)
    assert all(again)
    assert list(watch.faults()) == []
    backend.close()


def test_a_directory_that_hangs_at_the_start_is_left_out(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others serve; opened too late, it is let go, so that it can be taken like any that comes back."""
    first = DiskBackend(paths)
    for place, chunk in enumerate(CHAIN):
        first.put(chunk.key, chunk.blob, stripe=place, timeout_s=10.0)
    first.close()
    silences_s = iter((0.01, 60.0))  # Only the first one is to be too slow, on whatever machine.
    monkeypatch.setattr(disk, "open_in_time", lambda opening, told, _: open_in_time(opening, told, next(silences_s)))
    calls.hung = paths[0]

    backend = DiskBackend(paths, calls=calls)
    left_out = dict(backend.left_out)
    calls.gate.set()
    while not backend.retake(paths[0]):
        pass

    assert list(left_out) == [paths[0]]
    assert "does not answer" in left_out[paths[0]]
    assert sorted(entry.place for entry in backend.entries()) == list(range(16))
    backend.close()


def test_what_tells_of_progress_has_its_time() -> None:
    """Each word counts, errors are raised, and who comes too late hears of it."""
    told: list[int] = []
    gate, heard = threading.Event(), threading.Event()
    late: list[str] = []

    def hangs(say: Heard) -> None:
        assert gate.wait(60.0)
        try:
            say(1)
        except TransportError as error:
            late.append(error.message)
        heard.set()

    def fails(say: Heard) -> None:
        say(7)
        raise TransportError("broken")

    with pytest.raises(TransportError, match="broken"):
        open_in_time(fails, told.append, 60.0)
    is_over = open_in_time(hangs, told.append, 0.01)
    gate.set()
    assert heard.wait(60.0)

    assert (told, is_over, late) == ([7], False, ["it answered too late"])
