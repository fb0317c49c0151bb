"""The line for buffers."""

from __future__ import annotations

import asyncio

import pytest

from services.storage.buffers import Buffers
from services.storage.staging import Staging


def _buffers(count: int) -> Buffers:
    return Buffers(Staging(count * 4096, 4096))


async def test_the_background_leaves_a_buffer_to_fetches() -> None:
    """Saves get half; a fetch that comes then does not wait."""
    buffers = _buffers(4)
    taken = [await buffers.take(is_urgent=False) for _ in range(2)]
    waiting = asyncio.create_task(buffers.take(is_urgent=False))
    await asyncio.sleep(0)
    fetched = await buffers.take(is_urgent=True)

    assert not waiting.done()
    buffers.give_back(taken[0], is_urgent=False)
    assert len(await waiting) == len(fetched) == 4096
    assert buffers.taken == 3


async def test_fetches_go_first() -> None:
    """Of those who wait for the only buffer, a fetch that came later is served first."""
    buffers = _buffers(1)
    held = await buffers.take(is_urgent=False)
    save = asyncio.create_task(buffers.take(is_urgent=False))
    fetch = asyncio.create_task(buffers.take(is_urgent=True))
    await asyncio.sleep(0)
    buffers.give_back(held, is_urgent=False)
    buffers.give_back(await fetch, is_urgent=True)

    assert await save is held


async def test_who_gives_up_waiting_takes_nothing() -> None:
    """A cancelled wait is skipped; one that was served at that very moment gives its buffer back."""
    buffers = _buffers(1)
    held = await buffers.take(is_urgent=True)
    first, second = (asyncio.create_task(buffers.take(is_urgent=True)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    buffers.give_back(held, is_urgent=True)
    with pytest.raises(asyncio.CancelledError):
        await first
    buffers.give_back(await second, is_urgent=True)

    assert buffers.taken == 0


async def test_a_buffer_is_given_back_whatever_happens() -> None:
    """An error inside does not lose it."""
    buffers = _buffers(1)
    with pytest.raises(ValueError, match="inside"):
        async with buffers.buffer(is_urgent=False):
            raise ValueError("inside")

    assert buffers.taken == 0
