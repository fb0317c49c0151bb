"""The bounded inbox of a subscription."""

from __future__ import annotations

import asyncio

from shared.bus.inbox import Inbox


async def test_flood_leaves_the_loop_to_others() -> None:
    """A handler that never suspends does not keep other tasks waiting until its queue is empty."""
    handled: list[int] = []
    handled_when_other_ran: list[int] = []

    async def handler(item: int) -> None:
        handled.append(item)

    async def other() -> None:
        handled_when_other_ran.append(len(handled))

    inbox = Inbox("flood", handler, limit=1000)
    for number in range(1000):
        inbox.put(number)
    await asyncio.sleep(0)
    await asyncio.create_task(other())
    await inbox.drain()
    await inbox.close()

    assert handled == list(range(1000))
    assert handled_when_other_ran[0] < 1000


async def test_items_after_close_are_forgotten() -> None:
    """Neither queued nor later items reach the handler of a closed inbox, and they are no drops."""
    handled: list[int] = []

    async def handler(item: int) -> None:
        handled.append(item)

    inbox = Inbox("closed", handler, limit=10)
    inbox.put(1)
    await inbox.close()
    inbox.put(2)
    await asyncio.sleep(0)

    assert handled == []
    assert inbox.dropped == 0


async def test_cancel_stops_a_handler_that_hangs() -> None:
    """A shutdown whose patience is over ends even a running handler."""
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(item: int) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    inbox = Inbox("hanging", handler, limit=10)
    inbox.put(1)
    await started.wait()
    inbox.cancel()
    await asyncio.wait_for(cancelled.wait(), 10)

    assert cancelled.is_set()
