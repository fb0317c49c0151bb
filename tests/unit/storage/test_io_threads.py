"""Blocking calls in threads: their results, their priority, and how long they are waited for."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable

import pytest

from services.storage.abandoned import Abandoned
from services.storage.io_threads import Hung, IoThreads
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


async def test_threads_that_are_given_up_fail_what_has_not_begun() -> None:
    """With the reason, whether or not it has its turn; what runs goes on, and who waits for that hears its answer."""
    threads, abandoned = IoThreads(2), Abandoned()
    entered, gate = threading.Event(), threading.Event()

    def call() -> bool:
        entered.set()
        return gate.wait(20.0)

    def attempt(function: Callable[[], bool]) -> asyncio.Task[bool]:
        return asyncio.create_task(threads.attempt(function, abandoned, is_urgent=False, timeout_s=None))

    running = attempt(call)
    await asyncio.to_thread(entered.wait, 20.0)
    waiting = [attempt(lambda: True) for _ in range(3)]
    await asyncio.sleep(0)
    threads.give_up("left out")
    waiting.append(attempt(lambda: True))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    gate.set()

    assert all(isinstance(result, TransportError) for result in results)
    assert await running
    assert len(abandoned) == 0


async def test_an_attempt_ends_in_time() -> None:
    """What does not answer is abandoned, and its place is another's only when it has ended."""
    threads, abandoned, gate = IoThreads(1), Abandoned(), threading.Event()

    with pytest.raises(Hung):
        await threads.attempt(lambda: gate.wait(20.0), abandoned, is_urgent=True, timeout_s=0.01)
    before = len(abandoned), threads.shares.running(is_urgent=True)
    gate.set()
    answer = await threads.attempt(lambda: 7, abandoned, is_urgent=True, timeout_s=None)

    assert before == (1, 1)
    assert (answer, len(abandoned)) == (7, 0)


async def test_a_call_that_fails_as_its_caller_is_cut_off_leaves_nothing_behind() -> None:
    """Its failure is of no use to the canceller, and is not logged as one that was never retrieved."""
    threads, failing = IoThreads(1), threading.Event()
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

    def fail() -> None:
        failing.set()
        assert gate.wait(20.0)
        raise TransportError("broken")

    gate, others = threading.Event(), set(threading.enumerate())
    task = asyncio.create_task(threads.attempt(fail, Abandoned(), is_urgent=True, timeout_s=None))
    while not failing.is_set():
        await asyncio.sleep(0)
    (thread,) = set(threading.enumerate()) - others
    threads.close()
    gate.set()
    thread.join(20.0)  # The event loop hears of the failure together with the cancellation.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await asyncio.sleep(0)  # The event loop lets go of it.
    gc.collect()

    assert complaints == []
