"""What a storage says of its tiers: faults come, are told, and are over once their cause is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import RemoteTier
from services.storage.tier_watch import TierWatch
from services.storage.warm_start import WarmStart
from shared.errors import CapacityError, TransportError
from tests.memory_backend import MemoryBackend

QUOTA = 16 * 4096
KEY = ChunkKey("aa" * 16, b"g" * 8, b"i" * 16)


class _Disk(MemoryBackend):
    """Directories as a test wants them."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**30)
        self.free = 2**30
        self.is_empty = True
        self.error: Exception | None = None

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        if self.error is not None:
            raise self.error
        return super().put(key, blob, stripe=stripe, timeout_s=timeout_s)

    def paths(self) -> list[str]:
        return [] if self.left_out else ["/disk"]

    def turn_of(self, stripe: int) -> str:
        return "/disk"

    def retake(self, path: str) -> bool:
        if self.error is None:
            self.left_out = {}
        return self.error is None

    def entries_in(self, path: str) -> Iterator[ChunkEntry]:
        return iter([] if self.error is not None or self.is_empty else [ChunkEntry(KEY, 4096)])

    def probe(self, *args: Any, **kwargs: Any) -> bool:
        self.failing = {} if self.error is None else {"/disk": str(self.error)}
        return not self.failing

    def free_bytes(self) -> int:
        return self.free

    def place_of(self, key: ChunkKey) -> tuple[str, int]:
        return "/disk", 4096


class _Events:
    def __init__(self) -> None:
        self.told: list[ChunkKey] = []

    async def listed(self, keys: list[ChunkKey]) -> None:
        self.told += keys

    async def dropped(self, keys: tuple[ChunkKey, ...]) -> None:
        pass


class _Store(MemoryBackend):
    """Answers when it is asked, if ``answers``."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**30)
        self.answers = False
        self.asked = 0
        self._fault = "it has not been asked yet"

    @property
    def fault(self) -> str:
        return self._fault

    def probe(self, *args: Any, **kwargs: Any) -> bool:
        self.asked += 1
        self._fault = "" if self.answers else "connection refused"
        if self._fault:
            raise TransportError(self._fault)
        return True


class Watched:
    """A disk under a clock that the test turns, and the watch over it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.backend = _Disk()
        self.tier = DiskTier(self.backend, QUOTA, IoThreads(1), clock_s=lambda: self.now_s)
        self.events = _Events()
        self.start = WarmStart(self.tier, self.events)  # type: ignore[arg-type]
        self.watch = TierWatch(self.tier, self.start, None)

    async def write(self) -> str:
        blob = memoryview(bytearray(4096))
        removing = asyncio.create_task(self.tier.removals.run())
        try:
            return (await self.tier.write(Arrival(KEY, blob.nbytes, 0, None), blob)).outcome
        finally:
            self.tier.removals.stop()
            await removing

    def told(self) -> list[tuple[str, str]]:
        return [(what, setting) for what, _, setting in self.watch.faults()]


async def test_a_sound_disk_is_not_told_of() -> None:
    """Room for the whole quota, and every directory in use."""
    watched = Watched()
    await watched.watch.first_look()

    assert watched.told() == []


async def test_a_quota_that_others_leave_no_room_for_is_told_until_there_is() -> None:
    """What chunks have already counts as room."""
    watched = Watched()
    watched.backend.free = QUOTA - 4096
    await watched.watch.look()
    before = watched.told()
    await watched.write()
    await watched.watch.look()

    assert before == [("quota", "--disk-kv-bytes")]
    assert watched.told() == []


async def test_a_directory_that_is_left_out_is_taken_and_its_chunks_are_told() -> None:
    """It is tried at each look, and told of until then."""
    watched = Watched()
    await watched.start.scan()
    watched.backend.left_out, watched.backend.error = {"/disk": "in use by process 7"}, TransportError("in use")
    await watched.watch.look()
    before = list(watched.watch.faults())
    watched.backend.error, watched.backend.is_empty = None, False
    await watched.watch.look()

    assert before == [("disk", "in use by process 7", "--disk-dir")]
    assert watched.told() == []
    assert watched.events.told == [KEY]
    assert KEY in watched.tier


async def test_a_disk_that_failed_is_tried_again_though_nobody_uses_it() -> None:
    """After its pause, not before; while that goes on the reason is told."""
    watched = Watched()
    watched.backend.error = TransportError("I/O error")
    assert await watched.write() == "failed"
    await watched.watch.look()
    told = list(watched.watch.faults())
    watched.backend.error = None
    await watched.watch.look()
    too_early = watched.told()
    watched.now_s += 2.0
    await watched.watch.look()

    assert told == [("disk", "I/O error", "--disk-dir")]
    assert too_early == [("disk", "--disk-dir")]
    assert watched.told() == []


async def test_a_full_disk_takes_chunks_again_once_one_fits() -> None:
    """Whether or not anybody has tried meanwhile."""
    watched = Watched()
    watched.backend.error, watched.backend.free = CapacityError("no space left on device"), 4095
    assert await watched.write() == "full"
    watched.now_s += 10.0
    await watched.watch.look()
    while_full = watched.told()
    watched.backend.error, watched.backend.free = None, 2**30
    await watched.watch.look()

    assert while_full == [("disk", "--disk-kv-bytes")]
    assert watched.told() == []
    assert await watched.write() == "stored"


@pytest.mark.parametrize("answers_at_once", [True, False])
async def test_a_store_is_asked_at_the_start_and_until_it_answers(answers_at_once: bool) -> None:
    """Nobody need read or write for that; one that answers is left in peace."""
    store = _Store()
    store.answers = answers_at_once
    watch = TierWatch(None, None, RemoteTier(store, IoThreads(1), timeout_s=1.0))
    await watch.first_look()
    first = list(watch.faults())
    store.answers = True
    await watch.look()
    await watch.look()

    assert first == ([] if answers_at_once else [("remote", "connection refused", "--remote")])
    assert list(watch.faults()) == []
    assert store.asked == (1 if answers_at_once else 2)
