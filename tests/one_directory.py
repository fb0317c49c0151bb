"""The calls of a disk with one directory, for tests' disks that only keep blobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from services.storage.backends import ChunkBackend, ChunkEntry, ChunkKey, Unreadable


class OneDirectory(ChunkBackend):
    """A directory that is always in use. See :class:`~services.storage.backends.Directories` for the calls.

    :class:`~tests.remote_calls.RemoteCalls` has ``probe``, which a store has, too.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self.failing: dict[str, str] = {}

    def paths(self) -> list[str]:
        return [self.name]

    def place_of(self, key: ChunkKey) -> tuple[str, int]:
        return self.name, 0

    def turn_of(self, stripe: int) -> str:
        return self.name

    def entries_in(self, path: str) -> Iterator[ChunkEntry]:
        return self.entries()

    def disown(self, key: ChunkKey) -> None:
        """Leave the blob where it is: what is written over it fails."""

    def unreadable(self, key: ChunkKey, *, timeout_s: float) -> Unreadable:
        return Unreadable()

    def check(self, path: str) -> None:
        """It is always the same."""

    def leave(self, path: str, reason: str) -> tuple[ChunkKey, ...]:
        return ()

    def retake(self, path: str) -> bool:
        return False

    def keep_heats(self, path: str, heats: Mapping[ChunkKey, float]) -> None:
        """Forget them."""

    def free_bytes(self) -> int:
        raise OSError("no file system")

    def shapes(self) -> Mapping[bytes, int]:
        return Counter(entry.key.geometry for entry in self.entries())

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        raise NotImplementedError

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        return False

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        return self.delete(key, timeout_s=timeout_s)
