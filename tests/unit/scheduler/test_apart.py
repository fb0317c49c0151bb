"""Bytes made by a copy of the process: as of the moment of the copy, or an error, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from services.scheduler.apart import Apart
from shared.errors import InternalError
from tests import waiting


def _for_ever() -> bytes:
    while True:
        signal.pause()


def _children() -> set[str]:
    """Processes that threads of this one have started and that were not there before the test."""
    found: set[str] = set()
    for thread in Path("/proc/self/task").iterdir():
        # A thread of an earlier test may end between the listing and this.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update((thread / "children").read_text().split())
    return found - _earlier


_earlier: set[str] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Processes that other tests have left to this one, such as a tracker of shared memory, are not counted."""
    _earlier.clear()
    _earlier.update(_children())


async def test_the_bytes_are_those_of_the_moment_of_the_copy() -> None:
    """What changes after the fork is not in them."""
    state = {"value": b"before"}
    copy = Apart(lambda: state["value"])
    state["value"] = b"after"

    assert await copy.result(60) == b"before"
    assert not _children()


async def test_more_than_a_pipe_holds_arrives_whole() -> None:
    """The copy writes as this process reads."""
    expected = bytes(range(250)) * 80_000
    copy = Apart(lambda: expected)

    assert await copy.result(60) == expected


async def test_an_error_in_the_copy_is_an_error_here() -> None:
    """A part of the bytes is never taken for all of them."""

    def fail() -> bytes:
        raise ValueError("cannot be encoded")

    with pytest.raises(InternalError, match="ended with 1"):
        await Apart(fail).result(60)
    assert not _children()


async def test_a_copy_that_is_killed_is_an_error_here() -> None:
    """The system may choose it when memory is short."""

    def die() -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    copy = Apart(die)

    with pytest.raises(InternalError, match="ended with -9"):
        await copy.result(60)


async def test_a_copy_that_takes_too_long_is_killed() -> None:
    """Its time is bounded, and it is gone when the caller learns of that."""
    copy = Apart(_for_ever)

    with pytest.raises(InternalError, match="not done"):
        await copy.result(0.05)
    assert not _children()


async def test_whoever_waits_no_longer_leaves_no_copy_behind() -> None:
    """Cancellation kills it."""
    copy = Apart(_for_ever)
    waiting = asyncio.create_task(copy.result(60))
    await asyncio.sleep(0)

    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not _children()


async def test_the_copy_holds_none_of_the_connections_of_this_process() -> None:
    """A peer sees the end of a connection when this process closes it, however long the copy lives."""
    reader, writer = os.pipe()
    copy = Apart(_for_ever)
    os.set_blocking(reader, False)
    waiting = asyncio.create_task(copy.result(60))

    os.close(writer)
    deadline = time.monotonic() + 30
    while True:
        try:
            end = os.read(reader, 1)
            break
        except BlockingIOError:  # The copy has not come to that yet.
            assert time.monotonic() < deadline, "the copy keeps the pipe open"
            await asyncio.sleep(0.001)

    assert end == b""
    waiting.cancel()
    await asyncio.wait({waiting})
    os.close(reader)


def test_a_copy_ends_with_its_process() -> None:
    """A process that is killed leaves no copy behind."""
    program = (
        "import signal; from services.scheduler.apart import Apart; Apart(signal.pause); "
        "print(open('/proc/thread-self/children').read(), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        copy = Path("/proc") / process.stdout.readline().strip() / "cmdline"
        is_running = bool(copy.read_bytes())
        process.kill()

    assert is_running
    assert waiting.holds(lambda: not (copy.exists() and copy.read_bytes()))
