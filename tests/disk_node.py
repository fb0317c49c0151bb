"""The disk side of one storage, from a start to an end, on a disk that fails as told."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.storage.backends import ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from services.storage.chunk_keys import NoCipher
from services.storage.chunk_reading import VerifiedRead
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.heat_notes import HeatNotes
from services.storage.io_threads import IoThreads
from services.storage.tier_watch import TierWatch
from services.storage.warm_start import WarmStart
from shared.errors import IntegrityError, TransportError
from tests.chunk_makers import SMALL, MadeChunk, aligned, make_chain

READ = VerifiedRead(SMALL, NoCipher(), "")
NBYTES = make_chain(1, seed=0)[0].blob.nbytes


class Faults(FileCalls):
    """System calls that fail, with EIO unless told otherwise, for paths that ``is_bad`` says."""

    def __init__(self) -> None:
        self.is_bad: Callable[[str], bool] = lambda path: False
        self.errno = errno.EIO

    def _check(self, path: str) -> None:
        if self.is_bad(path):
            raise OSError(self.errno, os.strerror(self.errno))

    def open(self, path: str, flags: int) -> int:
        self._check(path)
        return super().open(path, flags)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._check(f"reading {os.readlink(f'/proc/self/fd/{fd}')}")
        return super().read(fd, into, offset)

    def rename(self, source: str, target: str) -> None:
        self._check(f"renaming {source}")
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._check(path)
        super().unlink(path)

    def make_directory(self, path: str) -> None:
        self._check(path)
        super().make_directory(path)


class Told:
    """Stands for the events to the scheduler: what it believes to be on the disk."""

    def __init__(self) -> None:
        self.catalogue: dict[ChunkKey, None] = {}

    async def listed(self, keys: list[ChunkKey]) -> None:
        self.catalogue |= dict.fromkeys(keys)

    async def dropped(self, keys: list[ChunkKey] | tuple[ChunkKey, ...]) -> None:
        for key in keys:
            self.catalogue.pop(key, None)


@dataclass
class Node:
    """The disk side of one storage."""

    tier: DiskTier
    backend: DiskBackend
    start: WarmStart
    watch: TierWatch
    notes: HeatNotes
    told: Told

    async def save(self, chain: list[MadeChunk], value: float = 0.0, *, first: int = 0) -> list[str]:
        """What became of each chunk of a sequence, from its chunk ``first`` on."""
        above, outcomes = chain[first - 1].key if first else None, list[str]()
        for place, chunk in enumerate(chain[first:], first):
            arrival = Arrival(chunk.key, chunk.blob.nbytes, place, above, value)
            outcomes.append((await self.tier.write(arrival, chunk.blob)).outcome)
            above = chunk.key
        return outcomes

    async def can_read(self, chunk: MadeChunk) -> bool:
        try:
            return await self.tier.read(chunk.key, READ, aligned(NBYTES)) is not None
        except (IntegrityError, TransportError):
            return False

    def usable(self, chain: list[MadeChunk]) -> tuple[int, int]:
        """(chunks that are there, those of them with all that they continue)."""
        there = [chunk.key in self.tier for chunk in chain]
        return sum(there), there.index(False) if False in there else len(there)


@asynccontextmanager
async def running(
    paths: list[str], quota: int, calls: FileCalls | None = None, *, is_killed: bool = False
) -> AsyncIterator[Node]:
    """From the start, which finds what is there, to an orderly end, or to one without a word."""
    backend = DiskBackend(paths, calls=calls)
    clock_s = 0.0

    def now_s() -> float:
        nonlocal clock_s
        clock_s += 0.001
        return clock_s

    tier, told = DiskTier(backend, quota, IoThreads(2), clock_s=now_s), Told()
    start = WarmStart(tier, told)  # type: ignore[arg-type]
    notes = HeatNotes(tier, start)
    node = Node(tier, backend, start, TierWatch(tier, start, None, told), notes, told)  # type: ignore[arg-type]
    removing = asyncio.create_task(tier.removals.run())
    try:
        await start.scan()
        yield node
        if not is_killed:
            await notes.note()
    finally:
        tier.removals.stop()
        await removing
        backend.close()
