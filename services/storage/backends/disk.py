"""The disk tier: chunks in one or several directories, which take them in turn (HCache 4.2.1).

What is where is kept in memory, so that only reading a chunk touches a disk. The map is made from the names of files at
the start, and :meth:`DiskBackend.entries` makes sure of each by its header. It is of names at rest (``chunk_names``);
callers use those of the cell. A directory that cannot be used is left
out until :meth:`DiskBackend.retake` finds that it can be; one that fails later is passed over by writes while others
take them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.storage import measures
from services.storage.backends import BLOCK_BYTES, ChunkEntry, ChunkKey, check_ranges
from services.storage.backends.blob_names import name_in
from services.storage.backends.disk_directory import DiskDirectory
from services.storage.backends.file_calls import FileCalls
from services.storage.backends.key_locks import KeyLocks
from services.storage.chunk_names import ChunkNames
from shared import logs
from shared.errors import CapacityError, ConfigError, IntegrityError, InvalidRequest, KeyMissing, TransportError

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
    key: ChunkKey
    """Its name in the cell, or that at rest as long as the former is not known."""


class DiskBackend:
    """See :class:`~services.storage.backends.ChunkBackend`."""

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

        ``on_found`` is told of chunks as they are found here, by their number.

        Directories that cannot be used, or that another storage has, are left out, even if that leaves none. Raises
        ConfigError for one that is named twice.
        """
        if len({os.path.realpath(path) for path in paths}) < len(paths):
            raise ConfigError(f"a directory of the disk tier is named twice: {', '.join(paths)}")
        self._calls = calls or FileCalls()
        self._lock = threading.Lock()
        self._keys = KeyLocks()
        self._names = names or ChunkNames()
        self._places: dict[ChunkKey, _Place] = {}  # By names at rest.
        # By names of the cell, those at rest of what was written or read here: a chunk whose key is gone, or another
        # now, can still be deleted.
        self._at_rest: dict[ChunkKey, ChunkKey] = {}
        self._is_direct_wanted = is_direct_wanted
        self._taking = threading.Lock()
        self._is_closed = False
        self._has_told = False
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
        """See :class:`~services.storage.backends.ChunkBackend`. Raises InvalidRequest for a blob of no whole blocks,
        and KeyMissing for one that is sealed with a key that there is not any more.
        """
        if not blob.nbytes or blob.nbytes % BLOCK_BYTES:
            raise InvalidRequest(f"a blob of {blob.nbytes} bytes is not whole blocks")
        deadline_s = time.monotonic() + timeout_s
        name = self._name(key)
        if name is None:
            name = self._names.at_rest(key)
        with self._keys.hold(name, deadline_s):
            if self._find(name) is not None:
                return False
            directory = self._write(name, blob, stripe, deadline_s)
            with self._lock:
                self._place(name, _Place(directory, blob.nbytes, True, key))
            return True

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """See :class:`~services.storage.backends.ChunkBackend`."""
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
        """See :class:`~services.storage.backends.PartialReads`."""
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
        """See :class:`~services.storage.backends.PartialReads`."""
        deadline_s = time.monotonic() + timeout_s
        name = self._name(key)
        if name is None:
            return False
        with self._keys.hold(name, deadline_s):
            place = self._find(name)
            if place is None or place.nbytes != blob.nbytes:
                return False
            # In its own directory, whichever that is: a name must not be in two.
            place.directory.replace(name.path, blob, deadline_s)
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
            names = [name for name, place in self._places.items() if place.directory in taken]
        yield from self._entries(names)

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

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """See :class:`~services.storage.backends.ChunkBackend`. Reads headers that were not read before, a few ahead of
        the caller; a file whose header is not that of its chunk is quarantined, and one whose name tells what is
        sealed in it is deleted.
        """
        with self._lock:
            self._check_open()
            names = [name for name in self._places if not namespace or name.namespace == namespace]
        yield from self._entries(names)

    def _entries(self, names: Sequence[ChunkKey]) -> Iterator[ChunkEntry]:
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as executor:
            for start in range(0, len(names), _SCANNED_AT_ONCE):
                for entry in executor.map(self._entry, names[start : start + _SCANNED_AT_ONCE]):
                    if entry is not None:
                        yield entry

    def close(self) -> None:
        """See :class:`~services.storage.backends.ChunkBackend`."""
        if not self._keys.close(CLOSE_S):
            _log.error("disk_closed_while_writing", waited_s=CLOSE_S)
        with self._lock:
            self._is_closed = True
            self._places.clear()
            self._at_rest.clear()
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
                    (key, _Place(directory, nbytes, False, key)) for key, nbytes in found if key not in self._places
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

    def _name(self, key: ChunkKey) -> ChunkKey | None:
        """The name at rest under which a chunk is here, or would be; None if there is no key to tell."""
        with self._lock:
            known = self._at_rest.get(key)
            if known is not None or key in self._places:
                return known or key
        try:
            return self._names.at_rest(key)
        except KeyMissing:
            return None

    def _place(self, name: ChunkKey, place: _Place) -> None:
        """Remember where a chunk is, under the lock."""
        self._places[name] = place
        if place.key != name:
            self._at_rest[place.key] = name

    def _pop(self, name: ChunkKey) -> None:
        """Take a name at rest out of the maps."""
        with self._lock:
            place = self._places.pop(name, None)
            if place is not None and place.key != name:
                self._at_rest.pop(place.key, None)

    def _find(self, name: ChunkKey | None) -> _Place | None:
        with self._lock:
            self._check_open()
            return None if name is None else self._places.get(name)

    def _remove(self, key: ChunkKey, timeout_s: float, how: Callable[[DiskDirectory, str], bool]) -> bool:
        name = self._name(key)
        if name is None:
            return False
        with self._keys.hold(name, time.monotonic() + timeout_s):
            place = self._find(name)
            if place is None:
                return False
            is_gone = how(place.directory, name.path)
            self._pop(name)
            return is_gone

    def _forget(self, name: ChunkKey, place: _Place, deadline_s: float) -> None:
        """A file was missing: drop it from the map unless it was deleted, or written again, in the meantime."""
        with self._keys.hold(name, deadline_s):
            if self._find(name) is place and not place.directory.head(name.path, 1)[1]:
                _log.warning("chunk_vanished", chunk=name.path, directory=place.directory.path)
                self._pop(name)

    def _entry(self, name: ChunkKey) -> ChunkEntry | None:
        """The chunk's line of the inventory; None if it is gone, not sound, or cannot be read now."""
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
            found = name_in(memoryview(head), nbytes)
            if found.key != name:
                raise IntegrityError(f"it is chunk {found.key.path}", code="wrong_identity")
            if found.tells_tokens:
                self._drop_telling(name)
                return None
        except IntegrityError as error:
            if self.quarantine(name, timeout_s=CLOSE_S):
                _log.warning("chunk_quarantined", chunk=name.path, reason=error.message, code=error.code)
            return None
        except TransportError as error:
            _log.warning("chunk_not_listed", chunk=name.path, reason=error.message)
            return None
        self._names.learn(name.namespace, found.key_id)
        key = self._names.in_cell(name)
        with self._lock:
            if self._places.get(name) is place:
                self._place(name, _Place(place.directory, nbytes, True, key))
        return ChunkEntry(key, nbytes)

    def _drop_telling(self, name: ChunkKey) -> None:
        """A chunk that an earlier release has sealed under a name that tells its tokens: not even kept aside."""
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
