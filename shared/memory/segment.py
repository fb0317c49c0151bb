"""One mapped file in /dev/shm: the only way for bytes of KV to cross processes without a GPU.

The mapping lives exactly as long as something can reach it: every array handed out holds the mapping, so
``close`` never leaves an array that points at unmapped memory (the next access would be a segmentation fault).
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from shared import progress
from shared.errors import ConfigError, TransportError
from shared.memory import machine_memory
from shared.memory.machine_memory import memory_available_bytes
from shared.memory.segment_name import new_segment_name, parse_segment_name

SHM_DIRECTORY = machine_memory.SHM_DIRECTORY

_RESERVE_STEP_BYTES = 256 * 2**20


class SharedSegment:
    """A mapped file. Make one with :meth:`create` (the owner) or :meth:`attach` (every other process)."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        """Own ``mapping``, which maps the whole file ``name`` in /dev/shm."""
        self.name = name
        self.nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        # numpy takes a buffer export of the mapping: while any array made from this one lives, mmap.close()
        # fails with BufferError instead of unmapping under it.
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def create(cls, prefix: str, kind: str, nbytes: int, *, prefault: bool = True) -> SharedSegment:
        """Create a zero-filled segment owned by this process, mode 0600.

        ``prefault`` takes all its memory now; without it the file is sparse, pages come at first touch, and a full
        /dev/shm kills the process that touches one. Raises ConfigError, with the figures, when /dev/shm or the memory
        of this machine has less than ``nbytes``.
        """
        _check_room(kind, nbytes)
        name = str(new_segment_name(prefix, kind))
        path = SHM_DIRECTORY / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # The lock lives as long as the mapping (which keeps a duplicate of fd) and dies with the process. It
            # protects the segment from a reaper in another PID namespace, where our pid means nothing.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)
            if prefault:
                _reserve(fd, nbytes, kind)
            return cls(name, _map(fd, nbytes, writable=True, prefault=prefault))
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot make a {kind} segment of {_size(nbytes)}: {error}") from error
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, nbytes: int, *, writable: bool = True) -> SharedSegment:
        """Map a segment that another process made. With ``writable=False`` the array is read-only.

        Raises TransportError when there is no such segment or its size is not ``nbytes``.
        """
        if parse_segment_name(name) is None:
            raise TransportError(f"{name!r} is not the name of a shared segment")
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = os.open(SHM_DIRECTORY / name, access | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportError(f"cannot attach shared segment {name}: {error.strerror}") from error
        try:
            found = os.fstat(fd).st_size
            if found != nbytes or nbytes <= 0:
                raise TransportError(f"shared segment {name} has {found} bytes, not {nbytes}")
            return cls(name, _map(fd, nbytes, writable=writable, prefault=True))
        except OSError as error:
            raise TransportError(f"cannot map shared segment {name}: {error.strerror}") from error
        finally:
            os.close(fd)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, uint8 ``[nbytes]``. Views of it keep the mapping alive. Raises TransportError once closed."""
        if self._array is None:
            raise TransportError(f"shared segment {self.name} is closed")
        return self._array

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called; views may still hold the memory."""
        return self._mapping is None

    def close(self) -> bool:
        """Release the mapping. Return True if it is unmapped now, False if a view still holds it. Idempotent.

        In the second case the memory is freed with the last view; until then every view stays readable.
        """
        mapping, self._mapping, self._array = self._mapping, None, None
        if mapping is None:
            return True
        try:
            mapping.close()
        except BufferError:
            return False
        return True

    def unlink(self) -> None:
        """Remove the name. Mappings, here and in other processes, stay valid until they are closed. Idempotent."""
        (SHM_DIRECTORY / self.name).unlink(missing_ok=True)


def reap(prefix: str) -> list[str]:
    """Remove segments of ``prefix`` whose owner is dead; return their names, sorted."""
    return [name for name in _names(prefix) if _is_leftover(name) and _remove(name)]


def unlink_all(prefix: str) -> list[str]:
    """Remove every segment of ``prefix``, whichever process owns it; return their names, sorted."""
    return [name for name in _names(prefix) if _remove(name)]


def unlink_own(prefix: str) -> list[str]:
    """Remove every segment of ``prefix`` that this process made; return their names, sorted."""
    own = os.getpid()
    return [name for name in _names(prefix) if _is_owned_by(name, own) and _remove(name)]


def _is_owned_by(name: str, pid: int) -> bool:
    parsed = parse_segment_name(name)
    return parsed is not None and parsed.owner_pid == pid and parsed.owner_is_alive()


def _names(prefix: str) -> list[str]:
    parsed = (parse_segment_name(entry) for entry in sorted(os.listdir(SHM_DIRECTORY)))
    return [str(name) for name in parsed if name is not None and name.prefix == prefix]


def _is_leftover(name: str) -> bool:
    parsed = parse_segment_name(name)
    if parsed is None or parsed.owner_is_alive():
        return False
    try:
        fd = os.open(SHM_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # Gone already, or another user's.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # The owner lives in another PID namespace.
    finally:
        os.close(fd)
    return True


def _remove(name: str) -> bool:
    try:
        (SHM_DIRECTORY / name).unlink()
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _check_room(kind: str, nbytes: int) -> None:
    if nbytes <= 0:
        raise ConfigError(f"a {kind} segment must have at least one byte, not {nbytes}")
    try:
        filesystem = os.statvfs(SHM_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot use {SHM_DIRECTORY} for a {kind} segment: {error.strerror}") from error
    in_shm = filesystem.f_bavail * filesystem.f_frsize
    in_memory = memory_available_bytes()
    if nbytes > min(in_shm, in_memory):
        raise ConfigError(
            f"a {kind} segment needs {_size(nbytes)}, but {SHM_DIRECTORY} has {_size(in_shm)} free "
            f"and the machine {_size(in_memory)} of memory available"
        )


def _reserve(fd: int, nbytes: int, kind: str) -> None:
    """Take the memory now, in steps, so that a signal interrupts (and repeats) only one of them."""
    with progress.phase(f"making the {kind} pool", total=nbytes, unit="bytes") as advance:
        for start in range(0, nbytes, _RESERVE_STEP_BYTES):
            step = min(_RESERVE_STEP_BYTES, nbytes - start)
            os.posix_fallocate(fd, start, step)
            advance(step)


def _map(fd: int, nbytes: int, *, writable: bool, prefault: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
    if prefault:
        prefault_pages(np.frombuffer(mapping, dtype=np.uint8))
    return mapping


def prefault_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Enter every page of a mapping in this process's page table, without the interpreter lock.

    ``MAP_POPULATE`` would do the same while it holds that lock: a second for each GiB, and a multiple of it on full
    cores, in which no thread of the process runs, no heartbeat is sent and the process counts as dead.
    """
    # A reduction over one byte of each page; numpy releases the lock for it.
    np.bitwise_or.reduce(memory[:: mmap.PAGESIZE])


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**20:.1f} MiB)"
