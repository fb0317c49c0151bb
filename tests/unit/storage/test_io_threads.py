"""Blocking calls in threads: their results, their priority, and that none is abandoned."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from services.storage.io_threads import IoThreads
from services.storage.thread_priority import COPY_NICENESS
from shared.errors import TransportError


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_call_answers_or_raises() -> None:
    """Arguments go in, results and errors come out, and a failed call frees its place."""

    def fail() -> None:
        raise TransportError("broken")

    threads = IoThreads(1)

    assert await threads.run(True, divmod, 7, 2) == (3, 1)
    for _ in range(3):
        with pytest.raises(TransportError):
            await threads.run(True, fail)
    assert threads.shares.running(is_urgent=True) == 0


async def test_only_the_background_is_nice() -> None:
    """Fetches run at the process's priority, saves below it."""
    threads = IoThreads(2)

    assert await threads.run(True, _niceness) == os.getpriority(os.PRIO_PROCESS, 0)
    assert await threads.run(False, _niceness) == COPY_NICENESS


async def test_a_cancelled_call_is_waited_for() -> None:
    """Whoever cancels gets on only when the thread is done, however often it cancels."""
    threads = IoThreads(1)
    entered, gate = threading.Event(), threading.Event()
    ended: list[bool] = []

    def call() -> None:
        entered.set()
        gate.wait(20.0)
        ended.append(True)

    task = asyncio.create_task(threads.run(True, call))
    await asyncio.to_thread(entered.wait, 20.0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    was_done = task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not was_done
    assert ended == [True]


async def test_a_call_that_is_cancelled_while_it_waits_gives_its_place_away() -> None:
    """It never runs, and the next one does."""
    threads = IoThreads(1)
    entered, gate = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(20.0)

    holding = asyncio.create_task(threads.run(True, hold))
    await asyncio.to_thread(entered.wait, 20.0)
    ran: list[int] = []
    first = asyncio.create_task(threads.run(True, ran.append, 1))
    second = asyncio.create_task(threads.run(True, ran.append, 2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    await asyncio.gather(holding, second)

    assert first.cancelled() or first.cancelling()
    assert ran == [2]
    assert threads.shares.running(is_urgent=True) == 0
