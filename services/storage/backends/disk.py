"""The disk tier: chunks in one or several directories, which take them in turn (HCache 4.2.1).

What is where is kept in memory, so that only reading a chunk touches a disk. The map is made from the names of files at
the start, and :meth:`DiskBackend.entries` makes sure of each by its header. A directory that cannot be used is left
out until :meth:`DiskBackend.retake` finds that it can be; one that fails later is passed over by writes while others
take them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.storage.backends import BLOCK_BYTES, ChunkEntry, ChunkKey, check_ranges
from services.storage.backends.blob_names import name_in
from services.storage.backends.disk_directory import DiskDirectory
from services.storage.backends.file_calls import FileCalls
from services.storage.backends.key_locks import KeyLocks
from shared import logs
from shared.errors import CapacityError, ConfigError, IntegrityError, InvalidRequest, TransportError

SCAN_THREADS = 8
_SCANNED_AT_ONCE = 256

CLOSE_S = 30.0
"""The longest wait for writes under way at the end; a disk that hangs must not keep the process."""

PROBE_S = 5.0

_log = logs.get_logger("disk")


@dataclass(frozen=True, slots=True)
class _Place:
    directory: DiskDirectory
    nbytes: int
    is_checked: bool
    """Whether its header was read, or it was written here."""


class DiskBackend:
    """See :class:`~services.storage.backends.ChunkBackend`."""

    name = "disk"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        is_direct_wanted: bool = True,
        calls: FileCalls | None = None,
        on_found: Callable[[int], None] = lambda chunks: None,
    ) -> None:
        """Take the directories, remove what interrupted writes left, and learn the names of chunks. Blocking.

        ``on_found`` is told of chunks as they are found here, by their number.

        Directories that cannot be used, or that another storage has, are left out, even if that leaves none. Raises
        ConfigError for one that is named twice.
        """
        if len({os.path.realpath(path) for path in paths}) < len(paths):
            raise ConfigError(f"a directory of the disk tier is named twice: {', '.join(paths)}")
        self._calls = calls or FileCalls()
        self._lock = threading.Lock()
        self._keys = KeyLocks()
        self._places: dict[ChunkKey, _Place] = {}
        self._is_direct_wanted = is_direct_wanted
        self._taking = threading.Lock()
        self._is_closed = False
        self.left_out: dict[str, str] = {}
        """Directories that are not used, and why."""
        self.failing: dict[str, str] = {}
        """Directories that are used, and to which the last write failed, and why."""
        self.directories: list[DiskDirectory] = []
        try:
            for path in paths:
                self._take(path, on_found)
        except BaseException:
            self._release()
            raise

    @property
    def quarantined(self) -> int:
        """Files that turned out not to be their chunk, since the start."""
        return sum(directory.quarantined for directory in self.directories)

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.ChunkBackend`. Raises InvalidRequest for a blob of no whole blocks."""
        if not blob.nbytes or blob.nbytes % BLOCK_BYTES:
            raise InvalidRequest(f"a blob of {blob.nbytes} bytes is not whole blocks")
        deadline_s = time.monotonic() + timeout_s
        with self._keys.hold(key, deadline_s):
            if self._find(key) is not None:
                return False
            directory = self._write(key, blob, stripe, deadline_s)
            with self._lock:
                self._places[key] = _Place(directory, blob.nbytes, True)
            return True

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        place = self._find(key)
        if place is None:
            return 0
        nbytes = place.directory.get(key.path, place.nbytes, into)
        if not nbytes:
            self._forget(key, place, time.monotonic() + timeout_s)
        return nbytes

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        """See :class:`~services.storage.backends.PartialReads`."""
        check_ranges(ranges, into, first)
        place = self._find(key)
        if place is None:
            return 0
        if not place.directory.read_ranges(key.path, ranges, into, first, time.monotonic() + timeout_s):
            self._forget(key, place, time.monotonic() + timeout_s)
            return 0
        return place.nbytes

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.PartialReads`."""
        deadline_s = time.monotonic() + timeout_s
        with self._keys.hold(key, deadline_s):
            place = self._find(key)
            if place is None or place.nbytes != blob.nbytes:
                return False
            # In its own directory, whichever that is: a name must not be in two.
            place.directory.replace(key.path, blob, deadline_s)
            return True

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """See :class:`~services.storage.backends.ChunkBackend`. A chunk may be back after a loss of power."""
        return self._remove(key, timeout_s, DiskDirectory.delete)

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a chunk that failed verification, but keep the file for an operator. False if the tier lacked it."""
        return self._remove(key, timeout_s, DiskDirectory.quarantine)

    def retake(self) -> Iterator[ChunkEntry]:
        """See :class:`~services.storage.backends.Directories`."""
        with self._taking:
            taken = [directory for path in list(self.left_out) if (directory := self._take(path)) is not None]
        with self._lock:
            keys = [key for key, place in self._places.items() if place.directory in taken]
        yield from self._entries(keys)

    def probe(self) -> bool:
        """See :class:`~services.storage.backends.Directories`: writes a block to each, and removes it."""
        directories = list(self.directories)
        for directory in directories:
            try:
                directory.probe(time.monotonic() + PROBE_S)
            except (CapacityError, TransportError) as error:
                self._note_failing(directory, error.message)
            else:
                self._note_failing(directory, "")
        return bool(directories) and not self.failing

    def free_bytes(self) -> int:
        """See :class:`~services.storage.backends.Directories`; of what is free, what this user may have."""
        systems = {os.stat(directory.path).st_dev: directory.path for directory in list(self.directories)}
        found = [os.statvfs(path) for path in systems.values()]
        return sum(each.f_bavail * each.f_frsize for each in found)

    def shapes(self) -> Counter[bytes]:
        """See :class:`~services.storage.backends.Listing`."""
        with self._lock:
            return Counter(key.geometry for key in self._places)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """See :class:`~services.storage.backends.ChunkBackend`. Reads headers that were not read before, a few ahead of
        the caller; a file whose header is not that of its chunk is quarantined.
        """
        with self._lock:
            self._check_open()
            keys = [key for key in self._places if not namespace or key.namespace == namespace]
        yield from self._entries(keys)

    def _entries(self, keys: Sequence[ChunkKey]) -> Iterator[ChunkEntry]:
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as executor:
            for start in range(0, len(keys), _SCANNED_AT_ONCE):
                for entry in executor.map(self._entry, keys[start : start + _SCANNED_AT_ONCE]):
                    if entry is not None:
                        yield entry

    def close(self) -> None:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        if not self._keys.close(CLOSE_S):
            _log.error("disk_closed_while_writing", waited_s=CLOSE_S)
        with self._lock:
            self._is_closed = True
            self._places.clear()
        self._release()

    def _take(self, path: str, on_found: Callable[[int], None] = lambda chunks: None) -> DiskDirectory | None:
        """Begin to use a directory; None, and it is left out, if that cannot be."""
        try:
            directory = DiskDirectory(path, self._calls, is_direct_wanted=self._is_direct_wanted)
        except (TransportError, CapacityError, ConfigError) as error:
            self._leave_out(path, error.message)
            return None
        try:
            found = []
            for each in directory.scan():
                on_found(1)
                found.append(each)
            with self._lock:
                self._check_open()
                # Written again while this directory was left out; equal names are equal chunks.
                twice = [key for key, _ in found if key in self._places]
                self._places.update(
                    (key, _Place(directory, nbytes, False)) for key, nbytes in found if key not in self._places
                )
                self.directories.append(directory)
        except (TransportError, CapacityError) as error:
            self._leave_out(path, error.message)
            directory.close()
            return None
        for key in twice:
            with contextlib.suppress(TransportError):  # The next start finds it again.
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

    def _leave_out(self, path: str, reason: str) -> None:
        if self.left_out.get(path) != reason:
            _log.error("disk_directory_left_out", path=path, reason=reason)
        self.left_out[path] = reason

    def _write(self, key: ChunkKey, blob: memoryview, stripe: int, deadline_s: float) -> DiskDirectory:
        """Write to the directory whose turn it is, or to the next that can take it."""
        directories = list(self.directories)
        count = len(directories)
        failure: CapacityError | TransportError | None = None
        for place in range(stripe, stripe + count):
            directory = directories[place % count]
            try:
                directory.put(key.path, blob, deadline_s)
            except (CapacityError, TransportError) as error:
                self._note_failing(directory, error.message)
                failure = error
            else:
                self._note_failing(directory, "")
                return directory
        raise failure or TransportError(f"no directory can be used: {'; '.join(self.left_out.values())}")

    def _note_failing(self, directory: DiskDirectory, reason: str) -> None:
        """Log when a directory begins to fail and when it works again, not every time in between."""
        with self._lock:
            was_failing = bool(self.failing.pop(directory.path, ""))
            if reason:
                self.failing[directory.path] = reason
        if reason and not was_failing:
            _log.error("disk_directory_failing", path=directory.path, reason=reason)
        if was_failing and not reason:
            _log.info("disk_directory_works_again", path=directory.path)

    def _find(self, key: ChunkKey) -> _Place | None:
        with self._lock:
            self._check_open()
            return self._places.get(key)

    def _remove(self, key: ChunkKey, timeout_s: float, how: Callable[[DiskDirectory, str], bool]) -> bool:
        with self._keys.hold(key, time.monotonic() + timeout_s):
            place = self._find(key)
            if place is None:
                return False
            is_gone = how(place.directory, key.path)
            with self._lock:
                self._places.pop(key, None)
            return is_gone

    def _forget(self, key: ChunkKey, place: _Place, deadline_s: float) -> None:
        """A file was missing: drop it from the map unless it was deleted, or written again, in the meantime."""
        with self._keys.hold(key, deadline_s):
            if self._find(key) is place and not place.directory.head(key.path, 1)[1]:
                _log.warning("chunk_vanished", chunk=key.path, directory=place.directory.path)
                with self._lock:
                    self._places.pop(key, None)

    def _entry(self, key: ChunkKey) -> ChunkEntry | None:
        """The chunk's line of the inventory; None if it is gone, not sound, or cannot be read now."""
        place = self._find(key)
        if place is None:
            return None
        if place.is_checked:
            return ChunkEntry(key, place.nbytes)
        try:
            head, nbytes = place.directory.head(key.path, BLOCK_BYTES)
            if not nbytes:
                self._forget(key, place, time.monotonic() + CLOSE_S)
                return None
            found = name_in(memoryview(head), nbytes)
            if found != key:
                raise IntegrityError(f"it is chunk {found.path}", code="wrong_identity")
        except IntegrityError as error:
            if self.quarantine(key, timeout_s=CLOSE_S):
                _log.warning("chunk_quarantined", chunk=key.path, reason=error.message, code=error.code)
            return None
        except TransportError as error:
            _log.warning("chunk_not_listed", chunk=key.path, reason=error.message)
            return None
        with self._lock:
            if self._places.get(key) is place:
                self._places[key] = _Place(place.directory, nbytes, True)
        return ChunkEntry(key, nbytes)

    def _release(self) -> None:
        for directory in self.directories:
            directory.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the tier is closed")
