"""One directory of the disk tier: a file a chunk, written so that it is there whole or not at all.

::

    thermocline.lock                                     held by the storage whose directory it is
    chunks/<namespace>/<geometry>/<two digits>/<identity>.chunk
    writing/                                             files that have no name of a chunk yet; emptied at a start
    quarantine/                                          a few of the files that turned out not to be their chunk
    heats                                                what chunks were worth when that was noted last (``heat_file``)

A chunk is written to ``writing/``, then renamed. A process that ends before the rename leaves a file in ``writing/``;
after it, the chunk is whole. Nothing waits for the disk's own memory: after a loss of power the last chunks may be
missing, or torn under their names. Every byte of a chunk is checked before it is used, so either is a miss (ADR 0050).
Data that goes through the page cache is synced all the same, which bounds the unwritten data there and shows a disk
that cannot write it. A chunk known to be there is replaced only by ``replace``, in the same way: the old or the new
file has the name. The backend holds the chunk's name meanwhile (``key_locks``).

Where a file system was unmounted, its directory's path leads to the one below, which must not be filled in its place:
so nothing is written, and no file counts as missing, unless the lock file is still the one that was locked.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.backends.directory_lock import DirectoryLock
from services.storage.backends.file_calls import FileCalls, translated
from services.storage.backends.heat_file import NotedHeats
from shared import logs
from shared.errors import IntegrityError, InvalidRequest, TransportError

SUFFIX = ".chunk"
LOCK_FILE = "thermocline.lock"
CHUNKS, WRITING, QUARANTINE, HEATS = "chunks", "writing", "quarantine", "heats"

QUARANTINED_FILES = 32
"""Most quarantined files kept in each directory; further ones are deleted, because they are outside every quota."""

_DEPTH = 3  # Directories between ``chunks`` and a file.

_log = logs.get_logger("disk")


class DiskDirectory:
    """The files of one directory. Paths of chunks are those of ``ChunkKey.path``.

    Chunks may be read and changed from any thread; no two calls change the same chunk at once.
    """

    def __init__(self, path: str, calls: FileCalls, *, is_direct_wanted: bool) -> None:
        """Take a directory that exists, and empty ``writing/``.

        Raises ConfigError if another storage has it, TransportError or CapacityError if it cannot be used.
        """
        self.path = os.path.abspath(path)
        self._calls = calls
        self._chunks, self._writing, self._quarantine = (
            os.path.join(self.path, part) for part in (CHUNKS, WRITING, QUARANTINE)
        )
        self._names = itertools.count()
        self._counting = threading.Lock()
        self.quarantined = 0
        """Files moved to ``quarantine/``, or deleted because it was full, since the start."""
        self._making = threading.Lock()
        self._made: set[str] = set()
        with translated(f"directory {self.path} cannot be used"):
            self._lock = DirectoryLock(os.path.join(self.path, LOCK_FILE))
            try:
                for part in (self._chunks, self._writing, self._quarantine):
                    self._make_directory(part)
                self.leftovers = self._empty_writing()
                self.is_direct = is_direct_wanted and self._allows_direct()
            except BaseException:
                self._lock.release()
                raise

    def put(self, path: str, blob: memoryview, deadline_s: float) -> None:
        """Keep ``blob`` under a name that is free (or holds something unknown).

        Raises CapacityError, or TransportError, also when ``deadline_s`` (``time.monotonic``) passes between two
        calls; then nothing is left of it.
        """
        with translated(f"chunk {path} cannot be written to {self.path}"):
            self._write_as(self._file(path), blob, deadline_s, has_parents=False)

    def get(self, path: str, nbytes: int, into: memoryview) -> int:
        """Read a chunk of ``nbytes`` bytes to the front of ``into``; return fewer bytes if it is torn, 0 if it is gone.

        The size is an argument to save a call: each releases the interpreter, which others hold while they verify.
        """
        if nbytes > into.nbytes:
            raise IntegrityError(f"chunk {path} has {nbytes} bytes, not {into.nbytes}", code="wrong_layout")
        with self._opened(path, self._direct(into[:nbytes])) as fd:
            return 0 if fd is None else self._read(fd, into[:nbytes])

    def replace(self, path: str, blob: memoryview, deadline_s: float) -> None:
        """Put ``blob`` in the place of a chunk that is there.

        Raises as :meth:`put` does; then either of the two is there.
        """
        with translated(f"chunk {path} cannot be replaced in {self.path}"):
            self._write_as(self._file(path), blob, deadline_s)

    def probe(self, deadline_s: float, nbytes: int = BLOCK_BYTES) -> None:
        """Write ``nbytes`` bytes, whole blocks, and remove them.

        Raises CapacityError or TransportError if that fails.
        """
        temporary = os.path.join(self._writing, f"probe.{next(self._names)}")
        with translated(f"directory {self.path} cannot be written to"):
            try:
                self._write(temporary, memoryview(mmap.mmap(-1, nbytes)), deadline_s)
            finally:
                self._remove_quietly(temporary)

    def read_ranges(
        self, path: str, ranges: Sequence[tuple[int, int]], into: memoryview, first: int, deadline_s: float
    ) -> bool:
        """Read parts (offset, bytes) of a chunk to ``into``, to whose front offset ``first`` belongs.

        Return False if it is gone. Raises IntegrityError (``truncated``) if the file ends before they do,
        TransportError also past ``deadline_s``.
        """
        flags = self._direct(into)
        with self._opened(path, flags) as fd:
            if fd is None:
                return False
            if not flags:
                # Data around a part is not wanted: readahead would multiply the bytes read.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for offset, nbytes in ranges:
                start = offset - first
                if self._read(fd, into[start : start + nbytes], offset) < nbytes:
                    raise IntegrityError(f"chunk {path} ends before byte {offset + nbytes}", code="truncated")
                _check_time(deadline_s)
            return True

    def head(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """Return the first bytes of a chunk (at most ``nbytes``) and its size; (b"", 0) if there is none."""
        with self._opened(path) as fd:
            if fd is None:
                return b"", 0
            # The rest is not read soon: readahead would multiply the bytes that an inventory reads.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            head = memoryview(bytearray(nbytes))
            return bytes(head[: self._read(fd, head)]), self._calls.size(fd)

    def delete(self, path: str) -> bool:
        """Remove a chunk; return False if there is none."""
        with translated(f"chunk {path} cannot be deleted from {self.path}"):
            try:
                self._calls.unlink(self._file(path))
            except FileNotFoundError:
                self.check()
                return False
            self._remove_empty(os.path.dirname(self._file(path)))
            return True

    def quarantine(self, path: str) -> bool:
        """Move a chunk to ``quarantine/``, where an operator may look at it; return False if there is none."""
        return self._set_aside(self._file(path))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        """Yield (key, bytes) of all chunks, by names and sizes alone; files that cannot be chunks are quarantined."""
        with translated(f"directory {self.path} cannot be listed"):
            for file, nbytes in self._files(self._chunks, _DEPTH):
                path, is_chunk = os.path.relpath(file, self._chunks).removesuffix(SUFFIX), file.endswith(SUFFIX)
                try:
                    key = ChunkKey.parse(path)
                except InvalidRequest:
                    is_chunk = False
                if not is_chunk or not nbytes or nbytes % BLOCK_BYTES:
                    _log.warning("chunk_quarantined", file=file, reason="neither name nor size is that of a chunk")
                    self._set_aside(file)
                else:
                    yield key, nbytes

    def check(self) -> None:
        """Raise TransportError if this is not the directory that was opened, or not whole."""
        with translated(f"directory {self.path} cannot be used"):
            if not self._lock.is_in_place():
                raise TransportError(
                    f"directory {self.path} is not the one that was opened: its file system was unmounted, "
                    "or its files were removed or replaced"
                )
            for part in (self._chunks, self._writing):
                os.stat(part)

    def noted_heats(self) -> NotedHeats:
        """Return the heats noted last; empty if there is no whole note."""
        file = os.path.join(self.path, HEATS)
        if os.path.exists(file):
            with suppress(OSError):
                fd = self._calls.open(file, os.O_RDONLY)
                try:
                    into = memoryview(bytearray(self._calls.size(fd)))
                    return NotedHeats.unpack(bytes(into[: self._read(fd, into)]))
                finally:
                    self._calls.close(fd)
        return NotedHeats.unpack(b"")

    def note_heats(self, data: bytes, deadline_s: float) -> None:
        """Replace the file of heats by the bytes of ``pack_heats``. Raises as :meth:`put` does."""
        with translated(f"heats cannot be written to {self.path}"):
            self._write_as(os.path.join(self.path, HEATS), memoryview(data), deadline_s)

    def close(self) -> None:
        """Release the directory; idempotent."""
        self._lock.release()

    @contextmanager
    def _opened(self, path: str, flags: int = 0) -> Iterator[int | None]:
        """Open a chunk for reading in this block; None if there is none."""
        with translated(f"chunk {path} cannot be read from {self.path}"):
            try:
                fd: int | None = self._calls.open(self._file(path), os.O_RDONLY | flags)
            except FileNotFoundError:
                self.check()
                fd = None
            try:
                yield fd
            finally:
                if fd is not None:
                    self._calls.close(fd)

    def _file(self, path: str) -> str:
        return f"{self._chunks}/{path}{SUFFIX}"

    def _write_as(self, final: str, blob: memoryview, deadline_s: float, *, has_parents: bool = True) -> None:
        """Write to ``writing/``, then rename to ``final``, whose directories are made first unless it has them."""
        temporary = os.path.join(self._writing, f"{os.path.basename(final).removesuffix(SUFFIX)}.{next(self._names)}")
        self._write(temporary, blob, deadline_s)
        try:
            if not has_parents:
                self._make_parents(os.path.dirname(final))
            _check_time(deadline_s)
            try:
                self._calls.rename(temporary, final)
            except FileNotFoundError:
                # They were removed meanwhile: with the last chunk in them, or from outside.
                with self._making:
                    self._made.clear()
                self._make_parents(os.path.dirname(final))
                self._calls.rename(temporary, final)
        except BaseException:
            self._remove_quietly(temporary)
            raise

    def _write(self, path: str, blob: memoryview, deadline_s: float) -> None:
        self.check()
        direct = self._direct(blob)
        fd = self._calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct)
        try:
            offset = 0
            while offset < blob.nbytes:
                offset += self._calls.write(fd, blob[offset:], offset)
                _check_time(deadline_s)
            if not direct:
                self._calls.sync_data(fd)
        except BaseException:
            self._remove_quietly(path)
            raise
        finally:
            self._calls.close(fd)

    def _read(self, fd: int, into: memoryview, start: int = 0) -> int:
        """Fill ``into`` from byte ``start`` of the file on, as far as the file goes."""
        done = 0
        while done < into.nbytes and (count := self._calls.read(fd, into[done:], start + done)):
            done += count
        return done

    def _direct(self, buffer: memoryview) -> int:
        """Return the flag that bypasses the page cache, if the directory and the buffer allow it."""
        if not self.is_direct or buffer.nbytes % BLOCK_BYTES:
            return 0
        return os.O_DIRECT if np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK_BYTES == 0 else 0

    def _allows_direct(self) -> bool:
        """Return whether the file system takes a block past the page cache; some refuse only the write."""
        probe = os.path.join(self._writing, "probe")
        fd = -1
        try:
            fd = self._calls.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            self._calls.write(fd, memoryview(mmap.mmap(-1, BLOCK_BYTES)), 0)
        except OSError as error:
            # A full disk says nothing about the flag, and it can still be read from.
            return fd >= 0 and error.errno in (errno.ENOSPC, errno.EDQUOT)
        finally:
            if fd >= 0:
                self._calls.close(fd)
            self._remove_quietly(probe)
        return True

    def _make_directory(self, path: str) -> None:
        with suppress(FileExistsError):
            self._calls.make_directory(path)

    def _make_parents(self, directory: str) -> None:
        """Make a chunk's directories, unless this process made them and has not removed them since."""
        if directory in self._made:
            return
        with self._making:
            levels = os.path.relpath(directory, self._chunks).split(os.sep)
            for depth in range(1, len(levels) + 1):
                level = os.path.join(self._chunks, *levels[:depth])
                if level not in self._made:
                    self._make_directory(level)
                    self._made.add(level)

    def _remove_empty(self, directory: str) -> None:
        """Remove a chunk's directory and those above it, as far as they are empty: namespaces come and go."""
        with self._making, suppress(OSError):
            while directory != self._chunks:
                self._calls.remove_directory(directory)
                self._made.discard(directory)
                directory = os.path.dirname(directory)

    def _empty_writing(self) -> int:
        leftovers = [os.path.join(self._writing, name) for name in sorted(os.listdir(self._writing))]
        for leftover in leftovers:
            self._calls.unlink(leftover)
        return len(leftovers)

    def _files(self, directory: str, depth: int) -> Iterator[tuple[str, int]]:
        """Yield regular files below a directory, and their bytes; at any depth up to one more than chunks have.

        Empty directories are removed. What goes meanwhile, with its last chunk, is passed over.
        """
        try:
            with os.scandir(directory) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            self.check()
            return
        if not entries:
            self._remove_empty(directory)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from self._files(entry.path, depth - 1)
            elif entry.is_file(follow_symlinks=False):
                try:
                    nbytes = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                yield entry.path, nbytes

    def _set_aside(self, file: str) -> bool:
        with translated(f"{file} cannot be quarantined"):
            try:
                self._make_directory(self._quarantine)  # It may have been removed from outside.
                if len(os.listdir(self._quarantine)) >= QUARANTINED_FILES:
                    self._calls.unlink(file)
                else:
                    name = f"{os.path.basename(file)}.{time.time_ns()}"
                    self._calls.rename(file, os.path.join(self._quarantine, name))
            except FileNotFoundError:
                self.check()
                return False
            with self._counting:
                self.quarantined += 1
            self._remove_empty(os.path.dirname(file))
            return True

    def _remove_quietly(self, file: str) -> None:
        try:
            self._calls.unlink(file)
        except OSError as error:
            # The caller gets the first error; ``writing`` is emptied at the next start.
            if error.errno != errno.ENOENT:
                _log.warning("file_not_removed", file=file, reason=str(error))


def _check_time(deadline_s: float) -> None:
    """Raise TransportError past the deadline: a system call cannot be interrupted, but no further one is begun."""
    if time.monotonic() > deadline_s:
        raise TransportError("the disk took too long")
