"""What a process does in threads while it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from shared.lifecycle import Lifecycle, Stopping


async def test_work_returns_what_it_returns() -> None:
    """Or raises what it raises."""

    def fail() -> None:
        raise ValueError("wrong")

    life = Lifecycle()

    assert await life.in_thread(lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(ValueError, match="wrong"):
        await life.in_thread(fail)
    assert not life.has_given_up


async def test_the_thread_of_the_start_lives_on() -> None:
    """Children that it has started would be told that their parent has ended."""
    life = Lifecycle()

    first, second = [await life.in_thread(threading.current_thread) for _ in range(2)]

    assert first is second is not threading.main_thread()
    assert first.is_alive()


async def test_a_stop_does_not_wait_for_work() -> None:
    """However long it would take: a model of hundreds of gigabytes is given up at once."""
    life, begun, end = Lifecycle(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        end.wait()

    loading = asyncio.create_task(life.in_thread(load))
    await asyncio.to_thread(begun.wait)
    life.stop()

    with pytest.raises(Stopping):
        await loading
    assert life.has_given_up
    end.set()


@pytest.mark.parametrize("loop_lives", [True, False])
def test_a_result_that_comes_too_late_is_closed(loop_lives: bool) -> None:
    """A model's pool, for one, is shared memory with a name; the loop may have ended by then or not."""
    life, begun, end, closed = Lifecycle(), threading.Event(), threading.Event(), threading.Event()

    class Pool:
        def close(self) -> None:
            closed.set()

    def load() -> Pool:
        begun.set()
        end.wait()
        return Pool()

    async def start_and_stop() -> None:
        loading = asyncio.create_task(life.in_thread(load))
        await asyncio.to_thread(begun.wait)
        life.stop()
        with pytest.raises(Stopping):
            await loading
        if loop_lives:
            end.set()
            await asyncio.to_thread(closed.wait, 30)

    asyncio.run(start_and_stop())
    end.set()

    assert closed.wait(30)


async def test_a_process_that_stops_already_waits_for_nothing() -> None:
    """A signal may come between two parts of the start."""
    life, end = Lifecycle(), threading.Event()
    life.stop()

    with pytest.raises(Stopping):
        await life.in_thread(end.wait)
    assert life.has_given_up
    end.set()


def test_output_without_room_does_not_change_how_a_process_ends() -> None:
    """A process that gives its start up flushes its streams first, and ends as asked where they cannot be written."""
    program = """
import contextlib
import sys
import threading
from shared import logs
from shared.lifecycle import run_process

async def main(life):
    with contextlib.suppress(OSError):
        print("lost", file=sys.stderr)
    life.stop()
    await life.in_thread(threading.Event().wait)

logs.configure("worker", "w1")
raise SystemExit(run_process("worker", main))
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        arguments = [sys.executable, "-c", program]
        ended = subprocess.run(arguments, stderr=writer, env=environment, check=False, timeout=60)
    finally:
        os.close(writer)

    assert ended.returncode == 0
