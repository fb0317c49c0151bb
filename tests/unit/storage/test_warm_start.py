"""Becoming warm: what is found is listed, in the background, as far as it can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.warm_start import AT_ONCE, WarmStart
from shared.errors import TransportError
from tests.memory_backend import MemoryBackend

GEOMETRY = b"g" * 8


def _key(number: int) -> ChunkKey:
    return ChunkKey("aa" * 16, GEOMETRY, number.to_bytes(16, "big"))


class _Disk(MemoryBackend):
    """Says that it holds ``count`` chunks of one block, and fails after ``sound`` of them."""

    def __init__(self, count: int, sound: int) -> None:
        super().__init__(max_bytes=2**30)
        self._count, self._sound = count, sound

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        for number in range(self._count):
            if number == self._sound:
                raise TransportError("I/O error")
            yield ChunkEntry(_key(number), 4096)


class _Events:
    def __init__(self) -> None:
        self.told: list[ChunkKey] = []
        self.gone: list[ChunkKey] = []

    async def listed(self, keys: list[ChunkKey]) -> None:
        self.told += keys

    async def dropped(self, keys: tuple[ChunkKey, ...]) -> None:
        self.gone += keys


@pytest.mark.parametrize(
    ("count", "sound", "found"),
    [(0, 1, 0), (AT_ONCE + 3, 10**6, AT_ONCE + 3), (2 * AT_ONCE, AT_ONCE, AT_ONCE)],
)
async def test_what_can_be_read_is_listed(count: int, sound: int, found: int) -> None:
    """A disk that fails half-way is used as far as it was read; nothing is told before the end."""
    tier, events = DiskTier(_Disk(count, sound), 2**30, IoThreads(1)), _Events()
    start = WarmStart(tier, events)  # type: ignore[arg-type]
    announcing = asyncio.create_task(start.announce(GEOMETRY))
    await start.scan()
    await announcing

    assert events.told == [_key(number) for number in range(found)]
    assert len(tier.index) == found


async def test_what_exceeds_the_quota_goes() -> None:
    """A quota that was lowered is kept from the start."""
    tier, events = DiskTier(_Disk(10, 100), 4 * 4096, IoThreads(1)), _Events()
    removing = asyncio.create_task(tier.removals.run())
    start = WarmStart(tier, events)  # type: ignore[arg-type]
    await start.scan()
    tier.removals.stop()
    await removing

    assert len(tier.index) == 4
    assert len(events.gone) == 6
