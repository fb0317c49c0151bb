"""Bytes that a copy of this process makes while this one goes on: a snapshot without a pause as long as its encoding.

``fork`` copies the page tables and nothing else, so that the caller waits for milliseconds where encoding takes
seconds. The copy sees the state of that moment for as long as it lives, and the kernel copies what this process
changes meanwhile. Encoding hardly writes to what it reads, so the copy takes little memory besides its bytes.

The copy runs no event loop and closes everything that it inherited but its pipe: the broker sees this process's end
when this process ends. It is killed when it is not waited for any more, or when its time is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from shared.errors import InternalError

_ALL_WRITTEN = 0
_FAILED = 1
_FIRST_INHERITED = 3  # Behind the standard streams.
_MOST_DESCRIPTORS = 1 << 20


def trim_heap() -> None:
    """Give memory that glibc's heap holds free back to the system: 45 bytes a node of a million, in 3 ms.

    What a copy has to map is what this process holds. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Apart:
    """A copy at work. Await :meth:`result` once; :meth:`stop` is for those who will not."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        """Trim the heap and fork, which pauses the caller.

        Raises InternalError where the system has no room for a copy.
        """
        trim_heap()
        self._reader, writer = os.pipe()
        try:
            parent = os.getpid()
            self._pid = os.fork()
        except OSError as error:
            os.close(self._reader)
            os.close(writer)
            raise InternalError(f"this process cannot be copied: {error}") from error
        if not self._pid:
            _write_and_exit(make, writer, parent)
        os.close(writer)
        self._ending = threading.Lock()  # Its number may be another's once it was waited for.
        self._is_over = False

    async def result(self, timeout_s: float) -> bytes:
        """Return what the copy made. Raises InternalError when it failed or took longer than ``timeout_s``."""
        reading = asyncio.create_task(asyncio.to_thread(self._read))
        try:
            async with asyncio.timeout(timeout_s):
                data, status = await asyncio.shield(reading)
        except TimeoutError as error:
            raise InternalError(f"a copy of this process was not done after {timeout_s} s") from error
        finally:
            if not reading.done():
                self.stop()
                await asyncio.wait({reading})  # Ends with the pipe: nothing of the copy is left behind.
        if status != _ALL_WRITTEN:
            raise InternalError(f"a copy of this process ended with {status}")
        return data

    def stop(self) -> None:
        """Kill the copy, unless it has ended. A caller that waits for its result learns of it."""
        with self._ending:
            if not self._is_over:
                os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> tuple[bytes, int]:
        """Everything that the copy writes, and how it ended: an exit code, or less a signal. In a thread."""
        with open(self._reader, "rb", buffering=0) as pipe:
            data = pipe.readall() or b""
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            _, status = os.waitpid(self._pid, 0)
            self._is_over = True
        return data, os.waitstatus_to_exitcode(status)


def _write_and_exit(make: Callable[[], bytes], writer: int, parent: int) -> NoReturn:
    """Run the copy's whole life. No handler and no clean-up of this process runs in it."""
    code = _FAILED
    try:
        signal.set_wakeup_fd(-1)  # It is the other's.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _die_with(parent)
        os.closerange(_FIRST_INHERITED, writer)
        os.closerange(writer + 1, _MOST_DESCRIPTORS)
        gc.disable()  # It would write to every object that it looks at.
        left = memoryview(make())
        while left:
            left = left[os.write(writer, left) :]
        code = _ALL_WRITTEN
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Linux: be killed when the copied process dies. Where it has died already, there is no process to write to."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_FAILED)
