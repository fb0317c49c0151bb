"""A directory that hangs: it holds its own threads and buffers, and nobody else's."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.storage import disk_tier, used_directories
from services.storage.backends import disk
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from services.storage.backends.opening import Heard, open_in_time
from services.storage.buffers import Buffers
from services.storage.chunk_format import payload_view
from services.storage.chunk_keys import ChunkKeys, NoCipher
from services.storage.chunk_reading import VerifiedRead
from services.storage.chunk_source import ChunkSource, Lost
from services.storage.chunk_writing import seal
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.promotions import Brought
from services.storage.remote_tier import RemoteTier
from services.storage.staging import Staging
from services.storage.tier_watch import TierWatch
from services.storage.warm_start import WarmStart
from shared.errors import TransportError
from tests.chunk_makers import SMALL, aligned, make_chain
from tests.disk_node import Told
from tests.memory_backend import MemoryBackend
from tests.unit.storage.made_ciphers import make_cipher

READ = VerifiedRead(SMALL, NoCipher(), "")
CHAIN = make_chain(16, seed=1)
NBYTES = CHAIN[0].blob.nbytes
DEPTH = 4


class Hanging(FileCalls):
    """Calls for paths that begin with ``hung`` wait until ``gate`` is set; opening those with ``bad`` in them fails."""

    def __init__(self) -> None:
        self.hung = ""
        self.bad = "no path"
        self.gate = threading.Event()
        self.held = threading.Semaphore(0)

    def _wait(self, path: str) -> None:
        if self.hung and path.startswith(self.hung):
            self.held.release()
            assert self.gate.wait(60.0)

    def open(self, path: str, flags: int) -> int:
        if self.bad in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
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


async def _ended(calls: Hanging, tier: DiskTier) -> None:
    """Let what hangs go on to its end: a failure that comes after the event loop would be logged in another test."""
    calls.gate.set()
    async with asyncio.timeout(20.0):
        while len(tier.directories.abandoned):
            await asyncio.sleep(0)


def _pass_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that waits on the event loop for so long, or less, have waited."""
    loop = asyncio.get_running_loop()
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + seconds)


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


async def test_a_hung_read_shares_its_buffer_with_no_copy_of_the_store(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read writes to it whenever it goes on; the copy comes with the next fetch, to another buffer."""
    cipher, (chunk,), sealed = make_cipher(default=1), make_chain(1, seed=1), aligned(NBYTES)
    sealed[:] = chunk.blob
    seal(sealed, chunk.header, "default", cipher)
    threads, store = IoThreads(DEPTH), MemoryBackend(max_bytes=2**20)
    backend = DiskBackend(paths[:1], calls=calls)
    disk = DiskTier(backend, 2**20, threads)
    assert (await disk.write(Arrival(chunk.key, NBYTES, 0, None), sealed)).outcome == "stored"
    store.put(chunk.key, sealed, stripe=0, timeout_s=1.0)
    remote = RemoteTier(store, threads, timeout_s=5.0)
    buffers = Buffers(Staging(2 * NBYTES, NBYTES), disk.directories.abandoned)
    source = ChunkSource(SMALL, disk=disk, remote=remote, buffers=buffers, keys=ChunkKeys(cipher), promotions=None)
    (file,) = Path(paths[0]).rglob("*.chunk")
    file.write_bytes(bytes(NBYTES))  # So that what the disk gives at last cannot be mistaken for the chunk.
    calls.hung = paths[0]
    reading = asyncio.create_task(source.read(chunk.key, 0, "", lambda: 10.0))
    await _held(calls, 1)
    _pass_time(disk_tier.READ_TIMEOUT_S, monkeypatch)
    lost = await reading
    came = await source.read(chunk.key, 0, "", lambda: 10.0)
    taken = buffers.taken
    calls.gate.set()
    while len(disk.directories.abandoned):
        await asyncio.sleep(0)  # The read writes to its buffer until it ends.

    assert isinstance(lost, Lost)
    assert isinstance(came, Brought)
    assert (came.source, taken) == ("remote", 2)
    assert bytes(payload_view(came.blob, SMALL)) == bytes(payload_view(chunk.blob, SMALL))
    source.finish(came, is_promoted=False)
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
    writing = asyncio.create_task(tier.write(Arrival(chunk.key, NBYTES, 0, None), chunk.blob))
    await _held(calls, 1)
    _pass_time(disk_tier.WRITE_TIMEOUT_S, monkeypatch)
    hung = await writing
    tier.works()
    again = await tier.write(Arrival(chunk.key, NBYTES, 0, None), aligned_copy(chunk.blob))

    assert (hung.outcome, chunk.key in tier, again.outcome) == ("failed", True, "stored")
    assert list(backend.left_out) == [paths[0]]
    assert backend.place_of(chunk.key)[0] == paths[1]
    await _ended(calls, tier)
    backend.close()


async def test_a_directory_that_does_not_answer_is_left_out_until_it_does(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are away, what waits for it fails, it is told; looking after it holds nobody up, and it comes back."""
    monkeypatch.setattr("services.storage.tier_watch.ERRAND_S", 0.01)
    backend = DiskBackend(paths, calls=calls)
    tier, told = await _filled(backend), Told()
    start = WarmStart(tier, told)  # type: ignore[arg-type]
    start.is_over.set()
    watch = TierWatch(tier, start, None, told)  # type: ignore[arg-type]
    calls.hung = paths[0]
    reading = [asyncio.create_task(tier.read(chunk.key, READ, aligned(NBYTES))) for chunk in CHAIN[::2]]
    await _held(calls, DEPTH // 2)
    _pass_time(disk_tier.READ_TIMEOUT_S, monkeypatch)
    failures = await asyncio.gather(*reading, return_exceptions=True)
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


async def test_a_read_that_fails_before_the_others_hang_holds_nothing_up(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its directory is bad is asked beside the reads that hang; they are over in time, and so is all else."""
    monkeypatch.setattr(used_directories, "JUDGE_S", 2 * disk_tier.READ_TIMEOUT_S)
    backend = DiskBackend(paths, calls=calls)
    tier = await _filled(backend)
    calls.hung, calls.bad = paths[0], CHAIN[0].key.identity.hex()
    failing, *hanging = [asyncio.create_task(tier.read(chunk.key, READ, aligned(NBYTES))) for chunk in CHAIN[:8:2]]
    await _held(calls, DEPTH // 2 + 1)  # As many reads as the directory has threads, and the question.
    _pass_time(disk_tier.READ_TIMEOUT_S, monkeypatch)
    failures = await asyncio.gather(*hanging, return_exceptions=True)
    left_out, is_judged = list(backend.left_out), failing.done()
    (vanished,) = Path(paths[1]).rglob(f"{CHAIN[1].key.identity.hex()}.chunk")
    vanished.unlink()
    gone = await tier.read(CHAIN[1].key, READ, aligned(NBYTES))
    calls.gate.set()
    failures += await asyncio.gather(failing, return_exceptions=True)

    assert all(isinstance(failure, TransportError) for failure in failures)
    assert (left_out, is_judged) == ([paths[0]], False)
    assert gone is None
    assert set(tier.take_lost()) == {chunk.key for chunk in (*CHAIN[:8:2], CHAIN[1])}
    assert tier.index.used == (len(CHAIN) - 1) * NBYTES
    backend.close()


async def test_reads_that_are_cut_off_have_their_time_all_the_same(
    paths: list[str], calls: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that hangs is left out though no caller waits so long."""
    backend = DiskBackend(paths, calls=calls)
    tier = await _filled(backend)
    calls.hung = paths[0]
    reading = [asyncio.create_task(tier.read(chunk.key, READ, aligned(NBYTES))) for chunk in CHAIN[::2]]
    await _held(calls, DEPTH // 2)
    for read in reading:
        read.cancel()
    await asyncio.wait(reading)
    _pass_time(disk_tier.READ_TIMEOUT_S, monkeypatch)
    async with asyncio.timeout(20.0):
        await tier.directories.has_left.wait()

    assert all(read.cancelled() for read in reading)
    assert list(backend.left_out) == [paths[0]]
    assert sorted(tier.directories.take_left()) == sorted(chunk.key for chunk in CHAIN[::2])
    await _ended(calls, tier)
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


def test_no_link_of_a_directory_is_followed_before_its_time_is_bounded(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs at the very first call is left out like any other."""
    gate, look = threading.Event(), os.lstat

    def hang(path: str, **options: int) -> os.stat_result:
        assert not str(path).startswith(paths[0]) or gate.wait(60.0)
        return look(path, **options)

    monkeypatch.setattr(os, "lstat", hang)

    backend = DiskBackend(paths)

    gate.set()
    assert backend.paths()[-1] == paths[1]
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
