"""Blobs that are read in part and replaced, as ``Directories`` says, over memory and over a disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.storage.backends import BLOCK_BYTES
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from shared.errors import CapacityError, IntegrityError, InvalidRequest, TransportError
from tests.chunk_makers import aligned, make_chain
from tests.conformance.chunk_backends import FailingCalls
from tests.memory_backend import MemoryBackend
from tests.unit.storage.sparse.made_copies import GEOMETRY, copy_key, copy_of

CHUNKS = make_chain(2, seed=9, geometry=GEOMETRY)
KEY = copy_key(CHUNKS[0])
OLD, NEW = copy_of(CHUNKS[0]), copy_of(CHUNKS[0], order=list(range(63, -1, -1)))
NBYTES = OLD.nbytes

Make = Callable[[Path], "MemoryBackend | DiskBackend"]

KINDS: dict[str, Make] = {
    "memory": lambda folder: MemoryBackend(max_bytes=2**24),
    "disk": lambda folder: DiskBackend([str(folder)]),
    "disk by the page cache": lambda folder: DiskBackend([str(folder)], is_direct_wanted=False),
}


@pytest.fixture(params=list(KINDS))
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryBackend | DiskBackend]:
    """Each kind in turn, with one copy."""
    made = KINDS[request.param](tmp_path)
    made.put(KEY, OLD, stripe=0, timeout_s=5.0)
    yield made
    made.close()


def test_ranges_come_to_their_places(backend: MemoryBackend | DiskBackend) -> None:
    """What lies between them stays as it was; the size of the blob is told."""
    into = aligned(4 * BLOCK_BYTES)
    into[:] = b"\xee" * into.nbytes

    ranges = [(BLOCK_BYTES, BLOCK_BYTES), (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)]
    nbytes = backend.read_ranges(KEY, ranges, into, first=BLOCK_BYTES, timeout_s=5.0)

    gap = b"\xee" * BLOCK_BYTES
    assert nbytes == NBYTES
    assert bytes(into) == bytes(OLD[BLOCK_BYTES : 2 * BLOCK_BYTES]) + gap + bytes(
        OLD[3 * BLOCK_BYTES : 5 * BLOCK_BYTES]
    )


def test_memory_that_begins_anywhere_will_do(backend: MemoryBackend | DiskBackend) -> None:
    """It is slower, not wrong."""
    into = aligned(2 * BLOCK_BYTES)[8 : 8 + BLOCK_BYTES]

    backend.read_ranges(KEY, [(0, BLOCK_BYTES)], into, first=0, timeout_s=5.0)

    assert into == OLD[:BLOCK_BYTES]


def test_what_is_not_there_is_answered(backend: MemoryBackend | DiskBackend) -> None:
    """Neither read nor replaced."""
    key = copy_key(CHUNKS[1])

    assert backend.read_ranges(key, [(0, BLOCK_BYTES)], aligned(BLOCK_BYTES), first=0, timeout_s=5.0) == 0
    assert not backend.replace(key, NEW, timeout_s=5.0)


def test_a_file_that_went_is_answered_and_forgotten(tmp_path: Path) -> None:
    """Somebody deleted it behind the storage's back."""
    backend = DiskBackend([str(tmp_path)])
    backend.put(KEY, OLD, stripe=0, timeout_s=5.0)
    os.unlink(f"{tmp_path}/chunks/{KEY.path}.chunk")

    assert backend.read_ranges(KEY, [(0, BLOCK_BYTES)], aligned(BLOCK_BYTES), first=0, timeout_s=5.0) == 0
    assert list(backend.entries()) == []
    backend.close()


@pytest.mark.parametrize(
    ("ranges", "first"),
    [([(1, 4096)], 0), ([(0, 100)], 0), ([(0, 0)], 0), ([(4096, 4096)], 100), ([(0, 4096)], 4096), ([(4096, 8192)], 0)],
)
def test_ranges_that_do_not_fit_are_refused(
    backend: MemoryBackend | DiskBackend, ranges: list[tuple[int, int]], first: int
) -> None:
    """Whole blocks, within the memory that is there."""
    with pytest.raises(InvalidRequest):
        backend.read_ranges(KEY, ranges, aligned(2 * BLOCK_BYTES), first=first, timeout_s=5.0)


def test_a_blob_that_ends_too_early_is_truncated(backend: MemoryBackend | DiskBackend) -> None:
    """Never half of what was asked for."""
    first = NBYTES - BLOCK_BYTES
    with pytest.raises(IntegrityError) as caught:
        backend.read_ranges(KEY, [(first, 2 * BLOCK_BYTES)], aligned(2 * BLOCK_BYTES), first=first, timeout_s=5.0)

    assert caught.value.code == "truncated"


def test_what_is_replaced_is_new_as_a_whole(backend: MemoryBackend | DiskBackend) -> None:
    """A blob of another size replaces nothing."""
    assert backend.replace(KEY, NEW, timeout_s=5.0)
    assert not backend.replace(KEY, NEW[:-BLOCK_BYTES], timeout_s=5.0)

    into = aligned(NBYTES)
    assert backend.get(KEY, into, timeout_s=5.0) == NBYTES
    assert into == NEW
    assert [entry.key for entry in backend.entries()] == [KEY]


def _stored(folder: Path) -> bytes:
    """What a next start finds under the name, by whole reads."""
    backend = DiskBackend([str(folder)])
    try:
        assert [(entry.key, entry.nbytes) for entry in backend.entries()] == [(KEY, NBYTES)]
        assert backend.quarantined == 0
        into = aligned(NBYTES)
        assert backend.get(KEY, into, timeout_s=5.0) == NBYTES
        return bytes(into)
    finally:
        backend.close()


@pytest.mark.parametrize("at", range(5))
def test_a_replacement_that_fails_anywhere_leaves_one_of_the_two(tmp_path: Path, at: int) -> None:
    """Whichever system call fails, the old copy or the new one is there whole, now and at the next start."""
    calls = FailingCalls()
    backend = DiskBackend([str(tmp_path)], is_direct_wanted=False, calls=calls)  # Which syncs as well.
    backend.put(KEY, OLD, stripe=0, timeout_s=5.0)
    calls.fail_once_at = at
    has_failed = False
    try:
        backend.replace(KEY, NEW, timeout_s=5.0)
    except TransportError:
        has_failed = True
    calls.fail_once_at = -1

    into = aligned(NBYTES)
    assert has_failed == (at < 4)  # Open, write, sync, rename.
    assert backend.get(KEY, into, timeout_s=5.0) == NBYTES
    assert bytes(into) in (bytes(OLD), bytes(NEW))
    assert os.listdir(tmp_path / "writing") == []
    backend.close()
    assert _stored(tmp_path) == bytes(into)


def test_a_full_disk_keeps_the_old_one(tmp_path: Path) -> None:
    """A replacement needs room for both for a moment."""
    calls = FailingCalls()
    backend = DiskBackend([str(tmp_path)], calls=calls)
    backend.put(KEY, OLD, stripe=0, timeout_s=5.0)
    calls.failure = errno.ENOSPC

    with pytest.raises(CapacityError):
        backend.replace(KEY, NEW, timeout_s=5.0)

    calls.failure = 0
    backend.close()
    assert _stored(tmp_path) == bytes(OLD)


class _Killed(BaseException):
    """The process ends here."""


class _MortalCalls(FileCalls):
    """After ``left`` calls that change the disk nothing is done any more, as after ``kill -9``."""

    def __init__(self) -> None:
        self.left = 10**6

    def _reach(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Killed

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            self._reach()
        return super().open(path, flags)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._reach()
        # A half of it was written by then.
        return super().write(fd, data[: max(BLOCK_BYTES, data.nbytes // 2 // BLOCK_BYTES * BLOCK_BYTES)], offset)

    def sync_data(self, fd: int) -> None:
        self._reach()
        super().sync_data(fd)

    def rename(self, source: str, target: str) -> None:
        self._reach()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._reach()
        super().unlink(path)


@pytest.mark.parametrize("left", range(8))
def test_a_process_that_ends_within_a_replacement_leaves_one_of_the_two(tmp_path: Path, left: int) -> None:
    """The next start finds the old copy or the new one, whole, and nothing else."""
    calls = _MortalCalls()
    backend = DiskBackend([str(tmp_path)], calls=calls)
    backend.put(KEY, OLD, stripe=0, timeout_s=5.0)
    calls.left = left
    try:
        backend.replace(KEY, NEW, timeout_s=5.0)
        is_over = True
    except _Killed:
        is_over = False
    backend.close()

    found = _stored(tmp_path)
    assert found in (bytes(OLD), bytes(NEW))
    assert not is_over or found == bytes(NEW)
    assert left or found == bytes(OLD)
