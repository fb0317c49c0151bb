"""Signs of life: a small file in /dev/shm for each process, with a lock that ends with the process.

The kernel releases the lock when the process ends, for whatever reason, and a process that shares /dev/shm can see it
from another PID namespace. So a death is known at the next look, while silence has to last before it means anything. A
process that hangs or is frozen keeps its lock: missing heartbeats tell of that.

A file appears under its name only when it is locked and complete. It is made under another one that `reap` knows, too.

The lock belongs to the open file, which a child shares from a fork on. One that executes another program closes it
(``O_CLOEXEC``), and one that Python forks closes it here. A child that native code forks, and that goes on without
executing anything, keeps the sign alive for as long as it lives; then only heartbeats tell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import replace
from types import TracebackType

import msgspec

from shared.errors import ConfigError
from shared.ids import is_valid_name
from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import new_segment_name, parse_segment_name
from shared.messages.status import Kind
from shared.undecodable import UNDECODABLE

WATCHED_MOST = 256
"""Signs at most that one watch follows, each with an open file."""

_KIND, _DRAFT_KIND = "life", "life-draft"
_CONTENT_BYTES_MOST = 1024
_TRIES = 3


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner of a sign: the same three fields as in a heartbeat."""

    kind: Kind
    id: str
    incarnation: str


class LifeSign:
    """The sign of this process; it ends with :meth:`end`, with the ``with`` block, or with the process."""

    def __init__(self, name: str, fd: int) -> None:
        """Own ``fd``, the open and locked file ``name``; :meth:`show` makes both."""
        self.name = name
        self._fd: int | None = fd
        _shown[name] = self

    @classmethod
    def show(cls, prefix: str, kind: Kind, member_id: str, incarnation: str) -> LifeSign:
        """Show that this incarnation lives. Raises ConfigError when the file cannot be made in /dev/shm."""
        content = msgspec.msgpack.encode(Member(kind, member_id, incarnation))
        try:
            return cls(*_publish(prefix, content))
        except OSError as error:
            raise ConfigError(f"cannot show a sign of life in {SHM_DIRECTORY}: {error.strerror}") from error

    def end(self) -> None:
        """Remove the sign. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        del _shown[self.name]
        (SHM_DIRECTORY / self.name).unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # Closing would not unlock what a child still has open.
        os.close(fd)

    def __enter__(self) -> LifeSign:
        """Return this sign, which is shown already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the sign."""
        self.end()

    def let_go_in_child(self) -> None:
        """Close the file in a forked child, which unlocks nothing for the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_shown: dict[str, LifeSign] = {}


def _let_go_in_child() -> None:
    for sign in _shown.values():
        sign.let_go_in_child()
    _shown.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class LifeWatch:
    """A watch for the end of processes that show signs. Not thread-safe.

    A sign is opened when it is first seen and checked through that open file from then on, so its name may be removed
    at any time.
    """

    def __init__(self, prefix: str) -> None:
        """Watch the signs of ``prefix``, from the first look on."""
        self.is_full = False  # Whether the last look skipped a sign beyond WATCHED_MOST.
        self._prefix = prefix
        self._watched: dict[str, tuple[int, Member]] = {}  # By name: the open file, and its owner.

    def look(self) -> list[Member]:
        """Return members that were alive at an earlier look and have ended, each once, in order of appearance.

        Costs a listing of /dev/shm and a lock attempt for each sign. Signs that are unreadable, another user's, or
        never seen alive are skipped.
        """
        ended = []
        for name, (fd, member) in list(self._watched.items()):
            if not _is_held(fd):
                del self._watched[name]
                os.close(fd)
                ended.append(member)
        self._take_up_new()
        return ended

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for fd, _ in self._watched.values():
            os.close(fd)
        self._watched.clear()

    def _take_up_new(self) -> None:
        self.is_full = False
        for name in self._names():
            if name in self._watched:
                continue
            if len(self._watched) >= WATCHED_MOST:
                self.is_full = True
                return
            found = _open(name)
            if found is not None:
                self._watched[name] = found

    def _names(self) -> list[str]:
        start = f"{self._prefix}."
        try:
            names = sorted(name for name in os.listdir(SHM_DIRECTORY) if name.startswith(start))
        except OSError:
            return []  # No new sign can be seen now; watched ones still are.
        parsed = ((name, parse_segment_name(name)) for name in names)
        return [name for name, parts in parsed if parts is not None and parts.kind == _KIND]


def _publish(prefix: str, content: bytes) -> tuple[str, int]:
    """Create the file; return its name and the open file that holds the lock."""
    for _ in range(_TRIES):
        draft = new_segment_name(prefix, _DRAFT_KIND)
        name = str(replace(draft, kind=_KIND))
        path = SHM_DIRECTORY / str(draft)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
            path.rename(SHM_DIRECTORY / name)
        except (BlockingIOError, FileNotFoundError):
            # A process in another PID namespace reaped the draft in the moment before it was locked.
            _discard(fd, path)
        except BaseException:
            _discard(fd, path)
            raise
        else:
            return name, fd
    raise OSError(errno.EBUSY, f"others removed it {_TRIES} times")


def _discard(fd: int, path: os.PathLike[str]) -> None:
    os.close(fd)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _open(name: str) -> tuple[int, Member] | None:
    """Return a sign whose owner lives, or None."""
    try:
        # A pipe of that name must not block us.
        fd = os.open(SHM_DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None  # Gone meanwhile, or another user's.
    member = _read(fd) if _is_held(fd) else None
    if member is None:
        os.close(fd)
        return None
    return fd, member


def _read(fd: int) -> Member | None:
    try:
        status = os.fstat(fd)
        # Another user could remove a sign that only looks like one of ours.
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        member = msgspec.msgpack.decode(os.pread(fd, _CONTENT_BYTES_MOST, 0), type=Member)
    except (OSError, *UNDECODABLE):
        return None
    return member if is_valid_name(member.id) else None


def _is_held(fd: int) -> bool:
    """Return whether the owner holds the lock. A shared lock is tried, so that watches do not disturb one another.

    It is released at once: a reaper that came in that moment would leave the file to the next one.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True  # Held; or unknown, and then no process is declared dead.
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
