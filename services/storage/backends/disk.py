"""The disk tier: chunks in one or several directories, which take them in turn (HCache 4.2.1).

The places of chunks are kept in memory, so that only reading a chunk touches a disk. The map is made from the names of
files at the start, and :meth:`DiskBackend.entries` verifies each by its header. It holds names at rest
(``chunk_names``); callers use those of the cell. A directory that cannot be used, or in which nothing can be read any
more, is left out until :meth:`DiskBackend.retake` finds that it works; one to which a write failed is passed over while
others take them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from services.storage import measures
from services.storage.backends import BLOCK_BYTES, ChunkEntry, ChunkKey, Unreadable, check_ranges
from services.storage.backends.blob_names import entry_in
from services.storage.backends.disk_directory import DiskDirectory
from services.storage.backends.file_calls import FileCalls, translated
from services.storage.backends.heat_file import NotedHeats, pack_heats
from services.storage.backends.key_locks import Holding, KeyLocks
from services.storage.backends.opening import open_in_time
from services.storage.chunk_names import ChunkNames
from shared import logs
from shared.errors import CapacityError, ConfigError, IntegrityError, InvalidRequest, KeyMissing, TransportError

SCAN_THREADS = 8
_SCANNED_AT_ONCE = 256

CLOSE_S = 30.0
"""Longest wait for writes under way at the end; a disk that hangs must not keep the process."""

CLOSE_HUNG_S = 1.0
"""Longest wait for releasing a directory that is left out, which may hang."""

PROBE_S = 5.0

OPEN_S = 10.0
"""How long a directory may be silent at the start before the others go on without it."""

WITNESSES = 3
"""Other chunks of a directory that are tried before it is left out because of an unreadable one."""

_log = logs.get_logger("disk")


@dataclass(frozen=True, slots=True)
class _Place:
    directory: DiskDirectory
    nbytes: int
    is_checked: bool
    """Whether its header was read, or it was written here."""
    key: ChunkKey
    """Its name in the cell, or at rest as long as the former is not known."""


class DiskBackend:
    """Chunks in directories of a disk; each may fail. See :class:`~services.storage.backends.ChunkBackend`."""

    name = "disk"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        is_direct_wanted: bool = True,
        calls: FileCalls | None = None,
        names: ChunkNames | None = None,
        on_found: Callable[[int], None] = lambda chunks: None,
    ) -> None:
        """Take the directories, remove what interrupted writes left, and learn the names of chunks. Blocking.

        ``on_found`` is called with the number of chunks found so far. A directory that does not answer for ``OPEN_S``
        seconds is left out.

        Directories that cannot be used, or that another storage has, are left out, even if that leaves none; so is one
        that another name leads to as well. Raises ConfigError for one that is named twice.
        """
        paths = [os.path.abspath(path) for path in paths]  # Links are not followed: that may hang.
        if len(set(paths)) < len(paths):
            raise ConfigError(f"a directory of the disk tier is named twice: {', '.join(paths)}")
        self._calls = calls or FileCalls()
        self._lock = threading.Lock()
        self._keys = KeyLocks()
        self._names = names or ChunkNames()
        self._places: dict[ChunkKey, _Place] = {}  # Places by names at rest.
        # Names at rest by names of the cell, for chunks written or read here: so a chunk can still be deleted when its
        # key is gone or has changed.
        self._at_rest: dict[ChunkKey, ChunkKey] = {}
        self._is_direct_wanted = is_direct_wanted
        self._around: dict[str, frozenset[int]] = {}  # Devices by directory; see :meth:`_check_mounted`.
        self._is_closed = False
        self._has_told = False
        self.left_out: dict[str, str] = {}
        """Reasons by directory that is not used."""
        self.failing: dict[str, str] = {}
        """Reasons by directory in use to which the last write failed."""
        self._refused: dict[str, int] = {}  # Bytes of the last blob for which a failing directory had no room.
        self.directories: list[DiskDirectory] = []
        self._noted: dict[DiskDirectory, NotedHeats] = {}  # Heats of the last note, until the next one.
        try:
            for path in paths:
                if not open_in_time(partial(self._take, path), on_found, OPEN_S):
                    self._leave_out(path, f"directory {path} does not answer")
        except BaseException:
            self._release()
            raise

    @property
    def quarantined(self) -> int:
        """Number of files since the start that were not the chunk of their name."""
        return sum(directory.quarantined for directory in self.directories)

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """Write a blob to the directory of its stripe; see :class:`~services.storage.backends.ChunkBackend`.

        Raises InvalidRequest for a blob of no whole blocks, and KeyMissing for one that is sealed with a key that is
        gone.
        """
        if not blob.nbytes or blob.nbytes % BLOCK_BYTES:
            raise InvalidRequest(f"a blob of {blob.nbytes} bytes is not whole blocks")
        deadline_s = time.monotonic() + timeout_s
        name = self._name(key)
        if name is None:
            name = self._names.at_rest(key)
        with self._keys.hold(name, deadline_s) as holding:
            if self._find(name) is not None:
                return False
            directory = self._write(name, blob, stripe, deadline_s, holding)
            with self._lock:
                if directory not in self.directories:
                    raise TransportError(f"directory {directory.path} was left out meanwhile")
                self._place(name, _Place(directory, blob.nbytes, True, key))
            return True

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """Read a blob and forget it if its file is gone; see :class:`~services.storage.backends.ChunkBackend`."""
        name = self._name(key)
        place = self._find(name)
        if name is None or place is None:
            return 0
        nbytes = place.directory.get(name.path, place.nbytes, into)
        if not nbytes:
            self._forget(name, place, time.monotonic() + timeout_s)
        return nbytes

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        """Read parts of a blob; forget it if its file is gone. See :class:`~services.storage.backends.Directories`."""
        check_ranges(ranges, into, first)
        name = self._name(key)
        place = self._find(name)
        if name is None or place is None:
            return 0
        if not place.directory.read_ranges(name.path, ranges, into, first, time.monotonic() + timeout_s):
            self._forget(name, place, time.monotonic() + timeout_s)
            return 0
        return place.nbytes

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        """Write the new file beside the old one and rename it; see :class:`~services.storage.backends.Directories`."""
        deadline_s = time.monotonic() + timeout_s
        name = self._name(key)
        if name is None:
            return False
        with self._keys.hold(name, deadline_s) as holding:
            place = self._find(name)
            if place is None or place.nbytes != blob.nbytes:
                return False
            holding.where = place.directory
            # In its own directory, because a name must not be in two.
            place.directory.replace(name.path, blob, deadline_s)
            return True

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Delete a chunk's file, which may be back after a loss of power.

        See :class:`~services.storage.backends.ChunkBackend`.
        """
        return self._remove(key, timeout_s, DiskDirectory.delete)

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a chunk that failed verification, but keep the file for an operator.

        Return False if the tier lacked it.
        """
        return self._remove(key, timeout_s, DiskDirectory.quarantine)

    def paths(self) -> list[str]:
        """List the directories in use; see :class:`~services.storage.backends.Directories`."""
        return [directory.path for directory in self.directories]

    def turn_of(self, stripe: int) -> str:
        """Return the directory at ``stripe`` in the turn, or the next that can take a blob.

        See :class:`~services.storage.backends.Directories`.
        """
        return next((directory.path for directory in self._in_turn(stripe)), "")

    def place_of(self, key: ChunkKey) -> tuple[str, int]:
        """Look the blob up in the map in memory; see :class:`~services.storage.backends.Directories`."""
        place = self._find(self._name(key))
        return ("", 0) if place is None else (place.directory.path, place.nbytes)

    def disown(self, key: ChunkKey) -> None:
        """Forget the place of a blob; see :class:`~services.storage.backends.Directories`."""
        name = self._name(key)
        with self._lock:
            if name is not None:
                self._pop(name)

    def unreadable(self, key: ChunkKey, *, timeout_s: float) -> Unreadable:
        """Read other files of the directory to find out whether it is bad.

        See :class:`~services.storage.backends.Directories`. The chunk's own file is quarantined. Nothing is removed
        from a directory that is bad as a whole.
        """
        deadline_s = time.monotonic() + timeout_s
        name = self._name(key)
        place = self._find(name)
        if name is None or place is None:
            return Unreadable()
        if not self._can_be_read(place.directory, name, deadline_s):
            return Unreadable(is_directory_bad=True)
        with self._keys.hold(name, deadline_s, place.directory):
            if self._find(name) is not place:
                return Unreadable()
            left_bytes = 0
            try:
                place.directory.quarantine(name.path)
            except (CapacityError, TransportError) as error:
                left_bytes = place.nbytes
                self._note_failing(place.directory, error, place.nbytes)
            self._drop(name, place)
            return Unreadable(left_bytes=left_bytes)

    def leave(self, path: str, reason: str) -> tuple[ChunkKey, ...]:
        """Forget the directory's chunks and close it in a thread, waited for ``CLOSE_HUNG_S`` at the most.

        See :class:`~services.storage.backends.Directories`.
        """
        with self._lock:
            directory = self._directory(path)
            if directory is None:
                return ()
            self.directories = [each for each in self.directories if each is not directory]
            names = [name for name, place in self._places.items() if place.directory is directory]
            keys = tuple(self._pop(name) for name in names)
            self.failing.pop(directory.path, None)
            self._refused.pop(directory.path, None)
            self._noted.pop(directory, None)
        self._keys.let_go(directory)
        self._leave_out(path, reason)
        closing = threading.Thread(target=directory.close, name="leave directory", daemon=True)
        closing.start()
        closing.join(CLOSE_HUNG_S)
        return keys

    def keep_heats(self, path: str, heats: Mapping[ChunkKey, float]) -> None:
        """Write the heats to one file of the directory; see :class:`~services.storage.backends.Directories`."""
        directory = self._directory(path)
        if directory is None:
            return
        of_it: dict[ChunkKey, float] = {}
        rest = iter(heats.items())
        while some := list(islice(rest, _SCANNED_AT_ONCE)):
            with self._lock:  # Held for a short time only, because readers need the lock.
                named = ((self._at_rest.get(key, key), heat) for key, heat in some)
                places = ((name, heat, self._places.get(name)) for name, heat in named)
                of_it |= {name: heat for name, heat, place in places if place and place.directory is directory}
        try:
            directory.note_heats(pack_heats(of_it), time.monotonic() + PROBE_S)
        except (CapacityError, TransportError) as error:
            _log.warning("heats_not_noted", path=path, reason=error.message)
        self._noted.pop(directory, None)

    def retake(self, path: str) -> bool:
        """Open the directory again and list its chunks; see :class:`~services.storage.backends.Directories`."""
        return path in self.left_out and self._take(path) is not None

    def check(self, path: str) -> None:
        """Compare the directory with the one that was opened; see :class:`~services.storage.backends.Directories`."""
        directory = self._directory(path)
        if directory is not None:
            directory.check()

    def probe(self, path: str) -> bool:
        """Write a block to the directory, and remove it; see :class:`~services.storage.backends.Directories`."""
        directory = self._directory(path)
        if directory is None:
            return False
        try:
            # Where a blob had no room, a smaller one shows nothing.
            directory.probe(time.monotonic() + PROBE_S, self._refused.get(path, BLOCK_BYTES))
        except (CapacityError, TransportError) as error:
            self._note_failing(directory, error, self._refused.get(path, BLOCK_BYTES))
            return False
        self._note_working(directory)
        return True

    def free_bytes(self) -> int:
        """Return the free bytes that this user may have; see :class:`~services.storage.backends.Directories`."""
        systems = {os.stat(directory.path).st_dev: directory.path for directory in list(self.directories)}
        found = [os.statvfs(path) for path in systems.values()]
        return sum(each.f_bavail * each.f_frsize for each in found)

    def shapes(self) -> Counter[bytes]:
        """Count chunks by the names of their files; see :class:`~services.storage.backends.Directories`."""
        with self._lock:
            return Counter(key.geometry for key in self._places)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Yield all chunks, reading headers that were not read before, a few ahead of the caller.

        See :class:`~services.storage.backends.ChunkBackend`. A file whose header is not that of its chunk is
        quarantined, and one whose name reveals what is sealed in it is deleted.
        """
        with self._lock:
            self._check_open()
            names = [name for name in self._places if not namespace or name.namespace == namespace]
        yield from self._entries(names)

    def entries_in(self, path: str) -> Iterator[ChunkEntry]:
        """Yield one directory's chunks as :meth:`entries` does."""
        directory = self._directory(path)
        with self._lock:
            self._check_open()
            names = [name for name, place in self._places.items() if place.directory is directory]
        yield from self._entries(names)

    def _entries(self, names: Sequence[ChunkKey]) -> Iterator[ChunkEntry]:
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as executor:
            for start in range(0, len(names), _SCANNED_AT_ONCE):
                for entry in executor.map(self._entry, names[start : start + _SCANNED_AT_ONCE]):
                    if entry is not None:
                        yield entry

    def close(self) -> None:
        """Refuse new calls, wait for writes under way for ``CLOSE_S`` at the most, and release the directories."""
        if not self._keys.close(CLOSE_S):
            _log.error("disk_closed_while_writing", waited_s=CLOSE_S)
        with self._lock:
            self._is_closed = True
            self._places.clear()
            self._at_rest.clear()
        self._release()

    def _take(self, path: str, on_found: Callable[[int], None] = lambda chunks: None) -> DiskDirectory | None:
        """Begin to use a directory; leave it out and return None if that fails."""
        try:
            self._check_mounted(path)
            directory = DiskDirectory(path, self._calls, is_direct_wanted=self._is_direct_wanted)
        except (TransportError, CapacityError, ConfigError) as error:
            self._leave_out(path, error.message)
            return None
        try:
            found = []
            for each in directory.scan():
                on_found(1)
                found.append(each)
            heats = directory.noted_heats()
            on_found(0)
            with self._lock:
                self._check_open()
                # Written again while this directory was left out; equal names are equal chunks.
                twice = [key for key, _ in found if key in self._places]
                self._places.update(
                    (key, _Place(directory, nbytes, False, key)) for key, nbytes in found if key not in self._places
                )
                self.directories = [*self.directories, directory]
                self._noted[directory] = heats
        except (TransportError, CapacityError) as error:
            self._leave_out(path, error.message)
            directory.close()
            return None
        for key in twice:
            with contextlib.suppress(TransportError):  # The next start finds the file again.
                directory.delete(key.path)
        self.left_out.pop(path, None)
        _log.info(
            "disk_directory_opened",
            path=directory.path,
            direct=directory.is_direct,
            chunks=len(found) - len(twice),
            leftovers_removed=directory.leftovers,
        )
        return directory

    def _check_mounted(self, path: str) -> None:
        """Raise TransportError for a directory of a file system that was around this one when it was first taken.

        So a directory is not made below a mount point while its disk is away. Another disk in its place is taken.
        """
        with translated(f"directory {path} cannot be used"):
            device = self._calls.device(path)
            if path not in self._around:
                self._around[path] = self._calls.devices_above(path) - {device}
        if device in self._around[path]:
            raise TransportError(
                f"directory {path} cannot be used: its file system is not mounted. It is used again once it is mounted "
                "there, and what is there now after a new start of this storage"
            )

    def _leave_out(self, path: str, reason: str) -> None:
        if self.left_out.get(path) != reason:
            _log.error("disk_directory_left_out", path=path, reason=reason)
        self.left_out[path] = reason

    def _write(
        self, key: ChunkKey, blob: memoryview, stripe: int, deadline_s: float, holding: Holding
    ) -> DiskDirectory:
        """Write to the directory whose turn it is, or to the next that can take it; last to those that fail.

        Raises CapacityError where one of them is only full.
        """
        failure: CapacityError | TransportError | None = None
        full: dict[DiskDirectory, str] = {}  # Those that were not full before, with the reason.
        for directory in self._in_turn(stripe):
            holding.where = directory
            try:
                directory.put(key.path, blob, deadline_s)
            except (CapacityError, TransportError) as error:
                if isinstance(error, CapacityError) and directory.path not in self._refused:
                    full[directory] = error.message
                self._note_failing(directory, error, blob.nbytes)
                failure = failure if isinstance(failure, CapacityError) else error
            else:
                self._note_working(directory)
                for other, reason in full.items():
                    _log.warning("disk_directory_full", path=other.path, reason=reason)
                return directory
        raise failure or TransportError(f"no directory can be used: {'; '.join(self.left_out.values())}")

    def _in_turn(self, stripe: int) -> list[DiskDirectory]:
        directories = self.directories
        turn = stripe % len(directories) if directories else 0
        return sorted(directories[turn:] + directories[:turn], key=lambda each: each.path in self.failing)

    def _directory(self, path: str) -> DiskDirectory | None:
        return next((directory for directory in self.directories if directory.path == path), None)

    def _note_failing(self, directory: DiskDirectory, error: CapacityError | TransportError, nbytes: int) -> None:
        """Log when a directory begins to fail, not every time; a blob of ``nbytes`` bytes could not be written.

        A full one is not logged here: chunks are evicted from it, or others take its blobs.
        """
        with self._lock:
            is_news = directory.path not in self.failing or directory.path in self._refused
            self.failing[directory.path] = error.message
            if isinstance(error, CapacityError):
                self._refused[directory.path] = nbytes
                return
            self._refused.pop(directory.path, None)
        if is_news:
            _log.error("disk_directory_failing", path=directory.path, reason=error.message)

    def _note_working(self, directory: DiskDirectory) -> None:
        with self._lock:
            was_failing = bool(self.failing.pop(directory.path, ""))
            was_full = bool(self._refused.pop(directory.path, 0))
        if was_failing and not was_full:
            _log.info("disk_directory_works_again", path=directory.path)

    def _can_be_read(self, directory: DiskDirectory, bad: ChunkKey, deadline_s: float) -> bool:
        """Return whether a directory gives anything but the chunk ``bad``: other chunks, or a block written now."""
        with self._lock:
            others = (key for key, place in self._places.items() if place.directory is directory and key != bad)
            witnesses = list(islice(others, WITNESSES))
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for key in witnesses:
            with contextlib.suppress(TransportError, IntegrityError):
                if directory.read_ranges(key.path, [(0, BLOCK_BYTES)], block, 0, deadline_s):
                    return True
        if witnesses:
            return False
        with contextlib.suppress(TransportError, CapacityError):
            directory.probe(deadline_s)
            return True
        return False

    def _name(self, key: ChunkKey) -> ChunkKey | None:
        """Return the name at rest under which a chunk is here, or would be; None without the key."""
        with self._lock:
            known = self._at_rest.get(key)
            if known is not None or key in self._places:
                return known or key
        try:
            return self._names.at_rest(key)
        except KeyMissing:
            return None

    def _place(self, name: ChunkKey, place: _Place) -> None:
        """Remember where a chunk is; called with the lock held."""
        self._places[name] = place
        if place.key != name:
            self._at_rest[place.key] = name

    def _pop(self, name: ChunkKey) -> ChunkKey:
        """Remove a name at rest from the maps, with the lock held; return the chunk's name in the cell."""
        place = self._places.pop(name, None)
        if place is None:
            return name
        self._at_rest.pop(place.key, None)
        return place.key

    def _find(self, name: ChunkKey | None) -> _Place | None:
        with self._lock:
            self._check_open()
            return None if name is None else self._places.get(name)

    def _remove(self, key: ChunkKey, timeout_s: float, how: Callable[[DiskDirectory, str], bool]) -> bool:
        name = self._name(key)
        if name is None:
            return False
        with self._keys.hold(name, time.monotonic() + timeout_s) as holding:
            place = self._find(name)
            if place is None:
                return False
            holding.where = place.directory
            is_gone = how(place.directory, name.path)
            self._drop(name, place)
            return is_gone

    def _drop(self, name: ChunkKey, place: _Place) -> None:
        """Forget the missing file of a chunk.

        The chunk may be elsewhere by now, if its directory was left out meanwhile.
        """
        with self._lock:
            if self._places.get(name) is place:
                self._pop(name)

    def _forget(self, name: ChunkKey, place: _Place, deadline_s: float) -> None:
        """Drop a missing file from the map unless it was deleted, or written again, in the meantime."""
        with self._keys.hold(name, deadline_s, place.directory):
            if self._find(name) is place and not place.directory.head(name.path, 1)[1]:
                _log.warning("chunk_vanished", chunk=name.path, directory=place.directory.path)
                self._drop(name, place)

    def _entry(self, name: ChunkKey) -> ChunkEntry | None:
        """Return the chunk's line of the inventory; None if it is gone or not sound.

        Its place is logged once, when its header is read.
        """
        place = self._find(name)
        if place is None:
            return None
        if place.is_checked:
            return ChunkEntry(place.key, place.nbytes)
        try:
            head, nbytes = place.directory.head(name.path, BLOCK_BYTES)
            if not nbytes:
                self._forget(name, place, time.monotonic() + CLOSE_S)
                return None
            found = entry_in(memoryview(head), nbytes)
            if found.key != name:
                raise IntegrityError(f"it is chunk {found.key.path}", code="wrong_identity")
            if found.key_id and not name.is_sealed:
                self._drop_telling(name)
                return None
        except IntegrityError as error:
            if self.quarantine(name, timeout_s=CLOSE_S):
                _log.warning("chunk_quarantined", chunk=name.path, reason=error.message, code=error.code)
            return None
        except TransportError as error:
            # It takes up space all the same, so it is listed. A read will find out.
            _log.warning("chunk_header_not_read", chunk=name.path, reason=error.message)
            return ChunkEntry(place.key, place.nbytes)
        self._names.learn(name.namespace, found.key_id)
        key = self._names.in_cell(name)
        parent = self._names.in_cell(found.parent) if found.parent is not None else None
        with self._lock:
            if self._places.get(name) is place:
                self._place(name, _Place(place.directory, nbytes, True, key))
            noted = self._noted.get(place.directory)
        return replace(found, key=key, parent=parent, heat=noted.of(name) if noted is not None else None)

    def _drop_telling(self, name: ChunkKey) -> None:
        """Delete a chunk that an earlier release sealed under a name that reveals its tokens, without quarantine."""
        if self.delete(name, timeout_s=CLOSE_S):
            measures.BAD_CHUNKS.labels(self.name, "tells_tokens").inc()
            with self._lock:
                is_first, self._has_told = not self._has_told, True
            if is_first:
                _log.warning("telling_chunks_deleted", reason="names of releases before 0.3 tell what is sealed")

    def _release(self) -> None:
        for directory in self.directories:
            directory.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the tier is closed")
