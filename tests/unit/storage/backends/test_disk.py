"""The disk tier beyond what every tier guarantees: directories, faults of theirs, and what is found in them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.storage.backends import BLOCK_BYTES
from services.storage.backends.disk import DiskBackend
from services.storage.backends.disk_directory import QUARANTINED_FILES, DiskDirectory
from services.storage.backends.file_calls import FileCalls
from shared.errors import CapacityError, ConfigError, InvalidRequest, TransportError
from tests.chunk_makers import MadeChunk, aligned, make_chain
from tests.conformance.chunk_backends import FailingCalls

CHUNKS = make_chain(12, seed=21)
NBYTES = CHUNKS[0].blob.nbytes
TIMEOUT_S = 30.0

Paths = Callable[[int], list[str]]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Empty directories."""

    def make(count: int) -> list[str]:
        made = [tmp_path / f"disk-{number}" for number in range(count)]
        for path in made:
            path.mkdir()
        return [str(path) for path in made]

    return make


def put(backend: DiskBackend, chunk: MadeChunk, stripe: int = 0) -> bool:
    return backend.put(chunk.key, chunk.blob, stripe=stripe, timeout_s=TIMEOUT_S)


def got(backend: DiskBackend, chunk: MadeChunk) -> bytes:
    into = aligned(NBYTES)
    return bytes(into[: backend.get(chunk.key, into, timeout_s=TIMEOUT_S)])


def chunk_files(path: str) -> list[Path]:
    return sorted((Path(path) / "chunks").rglob("*.chunk"))


def quarantined_files(path: str) -> list[Path]:
    return sorted((Path(path) / "quarantine").iterdir())


def file_of(path: str, chunk: MadeChunk) -> Path:
    return Path(path) / "chunks" / f"{chunk.key.path}.chunk"


def reopened_after(path: str, spoil: Callable[[], object]) -> DiskBackend:
    """Write all chunks, close, do something to the files, open."""
    first = DiskBackend([path])
    for chunk in CHUNKS:
        put(first, chunk)
    first.close()
    spoil()
    return DiskBackend([path])


def test_directories_take_chunks_in_turn(paths: Paths) -> None:
    """Chunk i of a sequence lies in directory i modulo their number, so that a sequence is read from all."""
    three = paths(3)
    backend = DiskBackend(three)

    for stripe, chunk in enumerate(CHUNKS):
        put(backend, chunk, stripe)

    for number, path in enumerate(three):
        assert chunk_files(path) == sorted(file_of(path, chunk) for chunk in CHUNKS[number::3])
    backend.close()


def test_files_are_the_owners_alone(paths: Paths) -> None:
    """KV tells of prompts: files are 0600 and directories 0700, whatever the umask lets through."""
    (path,) = paths(1)
    before = os.umask(0)
    try:
        backend = DiskBackend([path])
        put(backend, CHUNKS[0])
    finally:
        os.umask(before)

    modes = {entry.is_dir(): entry.stat().st_mode & 0o777 for entry in Path(path).rglob("*")}
    assert modes == {True: 0o700, False: 0o600}
    backend.close()


def test_a_directory_belongs_to_one_storage(paths: Paths) -> None:
    """A second storage, of this process or another, hears which process has it; after the end it is free."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    opening = f"from services.storage.backends.disk import DiskBackend; print(DiskBackend([{path!r}]).left_out)"

    here = DiskBackend([path])
    elsewhere = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True, check=True).stdout
    backend.close()
    after = DiskBackend([path])

    assert f"process {os.getpid()}" in here.left_out[path]
    assert f"in use by process {os.getpid()}" in elsewhere
    assert after.left_out == {}
    here.close()
    after.close()


def test_the_same_directory_twice_is_refused_and_lets_go(paths: Paths) -> None:
    """A slip in the settings is a ConfigError, after which nothing is held."""
    first, second = paths(2)

    with pytest.raises(ConfigError, match="twice"):
        DiskBackend([first, second, f"{first}/."])

    DiskBackend([first, second]).close()


def test_a_directory_under_two_names_is_used_once(paths: Paths, tmp_path: Path) -> None:
    """A link to it is in use already."""
    path, link = paths(1)[0], tmp_path / "link"
    link.symlink_to(path)

    backend = DiskBackend([path, str(link)])

    assert backend.paths() == [path]
    assert "in use" in backend.left_out[str(link)]
    backend.close()


def test_a_path_may_be_written_in_any_way(paths: Paths) -> None:
    """A directory that was left out under it comes back with its chunks."""
    (path,), (chunk,) = paths(1), make_chain(1, seed=1)
    first = DiskBackend([path])
    first.put(chunk.key, chunk.blob, stripe=0, timeout_s=1.0)
    second = DiskBackend([f"{path}/"])
    (left_out,) = second.left_out
    first.close()

    assert second.retake(left_out)
    assert [entry.key for entry in second.entries_in(left_out)] == [chunk.key]
    assert (second.paths(), second.left_out) == ([left_out], {})
    second.close()


def test_a_directory_that_cannot_be_used_is_left_out(paths: Paths, tmp_path: Path) -> None:
    """The others serve; why it is not used can be asked."""
    good = paths(1)
    missing, file = str(tmp_path / "missing"), tmp_path / "file"
    file.write_text("not a directory")

    backend = DiskBackend([missing, *good, str(file)])

    assert [directory.path for directory in backend.directories] == good
    assert set(backend.left_out) == {missing, str(file)}
    assert "No such file" in backend.left_out[missing]
    assert put(backend, CHUNKS[0], stripe=2)
    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


def test_without_any_directory_a_write_fails_and_says_why(tmp_path: Path) -> None:
    """The tier is there, and every write to it is an error that names each directory."""
    backend = DiskBackend([str(tmp_path / "missing")])

    with pytest.raises(TransportError, match="missing"):
        put(backend, CHUNKS[0])
    assert not backend.probe(str(tmp_path / "missing"))
    backend.close()


def test_a_directory_is_taken_once_it_can_be(paths: Paths, tmp_path: Path) -> None:
    """What it holds is told, and what was written elsewhere meanwhile is held once."""
    (good,) = paths(1)
    late = tmp_path / "late"
    late.mkdir()
    earlier = DiskBackend([str(late)])
    for chunk in CHUNKS[:2]:
        put(earlier, chunk)
    backend = DiskBackend([good, str(late)])
    put(backend, CHUNKS[0])

    assert not backend.retake(str(late))
    earlier.close()
    assert backend.retake(str(late))
    taken = list(backend.entries_in(str(late)))

    assert [entry.key for entry in taken] == [CHUNKS[1].key]
    assert backend.left_out == {}
    assert got(backend, CHUNKS[1]) == bytes(CHUNKS[1].blob)
    assert sorted(entry.key for entry in backend.entries()) == sorted(chunk.key for chunk in CHUNKS[:2])
    assert len(list(late.glob("chunks/*/*/*/*"))) == 1
    backend.close()


def test_a_directory_that_failed_works_again_without_a_chunk(paths: Paths) -> None:
    """A block that is written and removed shows it."""
    bad, good = paths(2)
    is_broken = True

    class Broken(FileCalls):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if is_broken and os.readlink(f"/proc/self/fd/{fd}").startswith(bad):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(fd, data, offset)

    backend = DiskBackend([bad, good], is_direct_wanted=False, calls=Broken())
    put(backend, CHUNKS[0], stripe=0)

    assert list(backend.failing) == [bad]
    assert not backend.probe(bad)
    is_broken = False
    assert backend.probe(bad)
    assert backend.failing == {}
    assert list(Path(bad).glob("writing/*")) == []
    backend.close()


def test_a_full_directory_is_passed_over_until_a_chunk_fits(paths: Paths) -> None:
    """A block that fits shows no room; that it is full is logged once where another takes its chunks."""
    (full, other), room = paths(2), BLOCK_BYTES

    class Full(FileCalls):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if offset + data.nbytes > room and os.readlink(f"/proc/self/fd/{fd}").startswith(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data, offset)

    backend = DiskBackend([full, other], calls=Full())
    with capture_logs() as logs:
        put(backend, CHUNKS[0], stripe=0)
        was_probed = backend.probe(full)
        failing = list(backend.failing)
        put(backend, CHUNKS[1], stripe=0)
    room = NBYTES
    is_probed = backend.probe(full)

    assert (was_probed, failing) == (False, [full])
    assert [(log["event"], log["path"]) for log in logs] == [("disk_directory_full", full)]
    assert (is_probed, backend.failing) == (True, {})
    backend.close()


def test_a_full_disk_that_takes_chunks_now_and_then_does_not_fill_the_log(paths: Paths) -> None:
    """Chunks are evicted for others: every second write fails."""
    (path,) = paths(1)
    is_full = False

    class Full(FileCalls):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data, offset)

    backend = DiskBackend([path], calls=Full())
    with capture_logs() as logs:
        for chunk in CHUNKS[:4]:
            is_full = True
            with pytest.raises(CapacityError):
                put(backend, chunk)
            is_full = False
            put(backend, chunk)

    assert logs == []
    backend.close()


def test_an_unwritable_directory_is_left_out(paths: Paths) -> None:
    """A directory whose every change fails with EACCES is not used, and its lock not kept."""
    bad, good = paths(2)

    class ReadOnly(FileCalls):
        def make_directory(self, path: str) -> None:
            if path.startswith(bad):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            super().make_directory(path)

    backend = DiskBackend([bad, good], calls=ReadOnly())

    assert list(backend.left_out) == [bad]
    DiskBackend([bad]).close()
    backend.close()


def test_leftovers_of_interrupted_writes_are_removed(paths: Paths) -> None:
    """What was being written when a process ended is gone after the next start, whatever it is."""
    (path,) = paths(1)
    backend = reopened_after(path, lambda: (Path(path) / "writing" / "half.7").write_bytes(b"half a chunk"))

    assert list((Path(path) / "writing").iterdir()) == []
    assert backend.directories[0].leftovers == 1
    assert len(list(backend.entries())) == len(CHUNKS)
    backend.close()


def test_files_that_are_not_their_chunk_are_quarantined(paths: Paths) -> None:
    """Torn, foreign, misplaced and damaged files are moved away and counted; the rest is listed."""
    (path,) = paths(1)

    def spoil() -> None:
        torn, foreign, swapped, damaged, empty = (file_of(path, chunk) for chunk in CHUNKS[:5])
        torn.write_bytes(bytes(CHUNKS[0].blob)[:4096])
        foreign.write_bytes(bytes(NBYTES))
        swapped.write_bytes(bytes(CHUNKS[7].blob))
        damaged.write_bytes(bytes(CHUNKS[3].blob[:100]) + b"\xff" + bytes(CHUNKS[3].blob[101:]))
        empty.write_bytes(b"")
        (Path(path) / "chunks" / "note.txt").write_text("no chunk")
        (torn.parent / "note.chunk").write_text("no chunk either")

    backend = reopened_after(path, spoil)
    listed = {entry.key for entry in backend.entries()}

    assert listed == {chunk.key for chunk in CHUNKS[5:]}
    assert backend.quarantined == 7
    assert len(quarantined_files(path)) == 7
    assert all(got(backend, chunk) == b"" and put(backend, chunk) for chunk in CHUNKS[:5])
    assert {entry.key for entry in backend.entries()} == {chunk.key for chunk in CHUNKS}
    backend.close()


def test_the_quarantine_is_bounded(paths: Paths) -> None:
    """Evidence is kept up to a number of files; more of it is deleted."""
    (path,) = paths(1)
    (Path(path) / "chunks").mkdir()
    for number in range(QUARANTINED_FILES + 3):
        (Path(path) / "chunks" / f"{number}.txt").write_text("no chunk")

    backend = DiskBackend([path])

    assert len(quarantined_files(path)) == QUARANTINED_FILES
    assert backend.quarantined == QUARANTINED_FILES + 3
    assert [entry for entry in (Path(path) / "chunks").iterdir() if entry.is_file()] == []
    backend.close()


def test_a_chunk_can_be_quarantined(paths: Paths) -> None:
    """Who finds that a chunk does not verify takes it out of the tier without destroying the evidence."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    put(backend, CHUNKS[0])

    assert backend.quarantine(CHUNKS[0].key, timeout_s=TIMEOUT_S)
    assert not backend.quarantine(CHUNKS[0].key, timeout_s=TIMEOUT_S)

    assert backend.quarantined == 1
    assert got(backend, CHUNKS[0]) == b""
    assert [file.read_bytes() for file in quarantined_files(path)] == [bytes(CHUNKS[0].blob)]
    assert put(backend, CHUNKS[0])
    backend.close()


def test_a_chunk_that_was_written_twice_is_kept_once(paths: Paths) -> None:
    """A chunk in two directories, because one was missing meanwhile, is listed once and deleted whole."""
    first, second = paths(2)
    for path in (first, second):
        backend = DiskBackend([path])
        put(backend, CHUNKS[0])
        backend.close()

    backend = DiskBackend([first, second])

    assert [entry.key for entry in backend.entries()] == [CHUNKS[0].key]
    assert backend.delete(CHUNKS[0].key, timeout_s=TIMEOUT_S)
    assert chunk_files(first) == chunk_files(second) == []
    backend.close()


def test_a_file_that_somebody_removed_is_not_there(paths: Paths) -> None:
    """The map follows the disk: a missing file is a missing chunk, and it can be written again."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    put(backend, CHUNKS[0])
    file_of(path, CHUNKS[0]).unlink()

    assert got(backend, CHUNKS[0]) == b""
    assert list(backend.entries()) == []
    assert put(backend, CHUNKS[0])
    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


def test_directories_go_with_their_last_chunk(paths: Paths) -> None:
    """Namespaces come and go for as long as a storage runs: nothing of one without chunks stays, also at a start."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    for chunk in CHUNKS:
        put(backend, chunk)

    for chunk in CHUNKS[1:]:
        assert backend.delete(chunk.key, timeout_s=TIMEOUT_S)
    left = sorted((Path(path) / "chunks").rglob("*"))
    assert backend.quarantine(CHUNKS[0].key, timeout_s=TIMEOUT_S)

    file = file_of(path, CHUNKS[0])
    assert left == sorted([*list(file.parents)[:3], file])
    assert list((Path(path) / "chunks").iterdir()) == []
    assert put(backend, CHUNKS[0])
    backend.close()
    for folder in ("a" * 32 + "/b/c", "a" * 32 + "/d"):
        (Path(path) / "chunks" / folder).mkdir(parents=True)
    again = DiskBackend([path])
    assert sorted((Path(path) / "chunks").rglob("*")) == left
    again.close()


def test_what_goes_during_a_listing_is_passed_over(paths: Paths) -> None:
    """Somebody empties the directory; it is gone only where its folder of chunks is, too."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    for chunk in CHUNKS:
        put(backend, chunk)
    backend.close()
    directory = DiskDirectory(path, FileCalls(), is_direct_wanted=False)
    listing = directory.scan()

    found = [next(listing)]
    for folder in (Path(path) / "chunks").iterdir():
        shutil.rmtree(folder)

    assert found + list(listing) == found
    directory.close()


def test_a_directory_that_goes_during_a_write_is_made_again(paths: Paths) -> None:
    """The last chunk of a directory is deleted just before another one gets its name there."""
    (path,) = paths(1)
    neighbours: dict[Path, MadeChunk] = {}
    for second in make_chain(64, seed=21):
        first = neighbours.setdefault(file_of(path, second).parent, second)
        if first is not second:
            break
    assert first is not second

    class Deleting(FileCalls):
        def rename(self, source: str, target: str) -> None:
            if target == str(file_of(path, second)) and file_of(path, first).exists():
                assert backend.delete(first.key, timeout_s=TIMEOUT_S)
            super().rename(source, target)

    backend = DiskBackend([path], calls=Deleting())
    put(backend, first)

    assert put(backend, second)

    assert chunk_files(path) == [file_of(path, second)]
    backend.close()


def test_directories_that_somebody_removed_are_made_again(paths: Paths) -> None:
    """Emptying ``chunks/`` under a running storage costs no write."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    put(backend, CHUNKS[0])
    for folder in sorted((Path(path) / "chunks").rglob("*"), reverse=True):
        folder.unlink() if folder.is_file() else folder.rmdir()
    assert got(backend, CHUNKS[0]) == b""

    assert put(backend, CHUNKS[0])

    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


def test_a_disk_that_went_away_is_broken_not_empty(paths: Paths, tmp_path: Path) -> None:
    """If the whole directory is missing its chunks are not forgotten: they are there when it is back."""
    (path,) = paths(1)
    backend = DiskBackend([path])
    put(backend, CHUNKS[0])
    os.rename(path, tmp_path / "elsewhere")

    with pytest.raises(TransportError):
        got(backend, CHUNKS[0])
    with pytest.raises(TransportError):
        put(backend, CHUNKS[1])
    with pytest.raises(TransportError):
        backend.delete(CHUNKS[0].key, timeout_s=TIMEOUT_S)

    os.rename(tmp_path / "elsewhere", path)
    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EIO, TransportError),
    ],
)
def test_faults_of_the_disk_have_types(paths: Paths, number: int, expected: type[Exception]) -> None:
    """No room is CapacityError, everything else TransportError; the cause is chained, and nothing is left behind."""
    (path,) = paths(1)
    calls = FailingCalls()
    backend = DiskBackend([path], calls=calls)
    calls.failure = number

    with pytest.raises(expected) as caught:
        put(backend, CHUNKS[0])

    assert isinstance(caught.value.__cause__, OSError)
    calls.failure = 0
    assert chunk_files(path) == []
    backend.close()


@pytest.mark.parametrize("call", range(7))
def test_a_put_that_fails_at_any_call_leaves_nothing(paths: Paths, call: int) -> None:
    """Whichever system call fails, no file is left in the directory and the next put does it all."""
    (path,) = paths(1)
    calls = FailingCalls()
    backend = DiskBackend([path], is_direct_wanted=False, calls=calls)  # Which syncs as well.
    calls.fail_once_at = call

    with pytest.raises(TransportError):
        put(backend, CHUNKS[0])

    assert calls.fail_once_at == -1, "the call was never made"
    assert chunk_files(path) == list((Path(path) / "writing").iterdir()) == []
    assert put(backend, CHUNKS[0])
    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


def test_writes_pass_over_a_directory_that_fails(paths: Paths) -> None:
    """With one disk full the chunk goes to the next; only when all are is the tier full."""
    full, free = paths(2)

    class OneFull(FileCalls):
        is_every_disk_full = False

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if self.is_every_disk_full or os.readlink(f"/proc/self/fd/{fd}").startswith(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data, offset)

    calls = OneFull()
    backend = DiskBackend([full, free], calls=calls)

    assert put(backend, CHUNKS[0], stripe=0)
    assert file_of(free, CHUNKS[0]).exists()
    calls.is_every_disk_full = True
    with pytest.raises(CapacityError):
        put(backend, CHUNKS[1], stripe=0)
    backend.close()


def test_without_direct_io_the_page_cache_serves(paths: Paths) -> None:
    """A file system that refuses the flag, or an operator who does not want it, costs speed and nothing else."""
    refusing, unwanted = paths(2)

    class Refusing(FileCalls):
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().open(path, flags)

    for backend in (DiskBackend([refusing], calls=Refusing()), DiskBackend([unwanted], is_direct_wanted=False)):
        assert not backend.directories[0].is_direct
        assert put(backend, CHUNKS[0])
        assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
        backend.close()


def test_a_full_disk_is_still_read_directly(paths: Paths) -> None:
    """That there is no room for a probe says nothing against the flag, and the directory stays in use."""
    (path,) = paths(1)
    first = DiskBackend([path])
    put(first, CHUNKS[0])
    first.close()

    class Full(FileCalls):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    backend = DiskBackend([path], calls=Full())

    assert backend.directories[0].is_direct == first.directories[0].is_direct
    assert got(backend, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    backend.close()


def test_a_blob_is_whole_blocks(paths: Paths) -> None:
    """Anything else is the caller's fault, before a disk is touched."""
    backend = DiskBackend(paths(1))

    for nbytes in (0, 100, 4097):
        with pytest.raises(InvalidRequest):
            backend.put(CHUNKS[0].key, aligned(8192)[:nbytes], stripe=0, timeout_s=TIMEOUT_S)
    backend.close()


def test_a_put_out_of_time_leaves_nothing(paths: Paths) -> None:
    """When its time is over between two system calls, a put is given up as TransportError."""
    (path,) = paths(1)
    backend = DiskBackend([path])

    with pytest.raises(TransportError, match="too long"):
        backend.put(CHUNKS[0].key, CHUNKS[0].blob, stripe=0, timeout_s=0.0)

    assert chunk_files(path) == list((Path(path) / "writing").iterdir()) == []
    backend.close()


def test_closing_waits_for_writes_under_way(paths: Paths) -> None:
    """A put that was begun is finished before ``close`` returns."""
    (path,) = paths(1)
    is_writing, may_go_on = threading.Event(), threading.Event()

    class Slow(FileCalls):
        def rename(self, source: str, target: str) -> None:
            is_writing.set()
            assert may_go_on.wait(TIMEOUT_S)
            super().rename(source, target)

    backend = DiskBackend([path], calls=Slow())
    with ThreadPoolExecutor(2) as executor:
        writing = executor.submit(put, backend, CHUNKS[0])
        assert is_writing.wait(TIMEOUT_S)
        closing = executor.submit(backend.close)
        assert not closing.done()
        may_go_on.set()
        closing.result(TIMEOUT_S)
        assert writing.done()
        assert writing.result()

    again = DiskBackend([path])
    assert got(again, CHUNKS[0]) == bytes(CHUNKS[0].blob)
    again.close()


def test_opening_needs_no_header(paths: Paths) -> None:
    """A start reads names alone; the headers are read once, when the inventory is asked for the first time."""
    opened: list[str] = []

    class Counting(FileCalls):
        def open(self, path: str, flags: int) -> int:
            if path.endswith(".chunk"):
                opened.append(path)
            return super().open(path, flags)

    (path,) = paths(1)
    reopened_after(path, lambda: None).close()
    backend = DiskBackend([path], calls=Counting())
    at_start = len(opened)

    first, second = list(backend.entries()), list(backend.entries())

    assert (at_start, len(opened)) == (0, len(CHUNKS))
    parents = [None, *(chunk.key for chunk in CHUNKS[:-1])]
    assert sorted((entry.place, entry.key) for entry in first) == [(n, chunk.key) for n, chunk in enumerate(CHUNKS)]
    assert all(entry.parent == parents[entry.place] for entry in first)
    assert [(entry.key, entry.nbytes) for entry in first] == [(entry.key, entry.nbytes) for entry in second]
    backend.close()


@pytest.mark.parametrize("free_inodes", [0, 7])
def test_a_file_system_without_inodes_is_not_called_one_without_bytes(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, free_inodes: int
) -> None:
    """The kernel says the same of both, and df shows room."""
    (path,) = paths(1)

    class Full(FileCalls):
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_CREAT and "probe" not in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return super().open(path, flags)

    backend = DiskBackend([path], calls=Full())
    found = os.statvfs(path)
    said = os.statvfs_result([*found[:5], 1000, free_inodes, free_inodes, *found[8:]])
    monkeypatch.setattr(os, "statvfs", lambda path: said)

    with pytest.raises(CapacityError, match="No space left on device") as raised:
        put(backend, CHUNKS[0])

    assert ("has no inodes" in raised.value.message) is (free_inodes == 0)
    backend.close()
