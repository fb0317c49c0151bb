"""Calls that nobody waits for keep their buffers until they end."""

from __future__ import annotations

import asyncio

from services.storage.abandoned import Abandoned
from tests.chunk_makers import aligned


async def test_a_buffer_is_free_once_its_call_has_ended() -> None:
    """One that no call uses is free at once, as is one that the call used from another place on."""
    abandoned, free = Abandoned(), list[str]()
    used, other = aligned(4096), aligned(4096)
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    abandoned.add(call, [used[:100]])
    abandoned.when_free(used, lambda: free.append("used"))
    abandoned.when_free(other, lambda: free.append("other"))
    before = list(free), len(abandoned)
    call.set_exception(OSError("nobody asks"))
    await asyncio.sleep(0)
    abandoned.when_free(used, lambda: free.append("again"))

    assert before == (["other"], 1)
    assert free == ["other", "used", "again"]
    assert len(abandoned) == 0


async def test_a_buffer_that_two_calls_use_is_free_after_both() -> None:
    """Whichever of them ends first."""
    abandoned, free = Abandoned(), list[str]()
    used = aligned(4096)
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    for call in (first, second):
        abandoned.add(call, [used])
    abandoned.when_free(used, lambda: free.append("used"))
    second.set_result(None)
    await asyncio.sleep(0)
    before = list(free)
    first.set_result(None)
    await asyncio.sleep(0)

    assert (before, free) == ([], ["used"])
    assert len(abandoned) == 0
