"""Bytes made by a forked copy of this process, so that a snapshot does not pause the fold while it is encoded.

``fork`` copies the page tables and nothing else, so that the caller waits for milliseconds where encoding takes
seconds. The copy sees the state of that moment for as long as it lives, and the kernel copies what this process changes
meanwhile. Encoding hardly writes to what it reads, so the copy takes little memory besides its bytes.

The copy runs no event loop and closes every inherited descriptor but its pipe: the broker sees this process's end when
this process ends. It is killed when its caller no longer waits for it, or when its time is over.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from services.scheduler.heap import trim_heap
from shared.errors import InternalError
from shared.lifecycle import EXIT_FAILED, EXIT_OK, die_with_parent

_FIRST_INHERITED = 3  # Behind the standard streams.
_MOST_DESCRIPTORS = 1 << 20


class Apart:
    """A forked copy at work. Await :meth:`result` once, or call :meth:`stop`."""

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
        self._ending = threading.Lock()  # Once it was waited for, its pid may be another process's.
        self._is_over = False

    async def result(self, timeout_s: float) -> bytes:
        """Return the copy's bytes. Raises InternalError when the copy failed or took longer than ``timeout_s``."""
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
        if status != EXIT_OK:
            raise InternalError(f"a copy of this process ended with {status}")
        return data

    def stop(self) -> None:
        """Kill the copy, unless it has ended; a pending :meth:`result` then raises InternalError."""
        with self._ending:
            if not self._is_over:
                os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> tuple[bytes, int]:
        """Return everything that the copy writes, and its exit code (negative: a signal). Runs in a thread."""
        with open(self._reader, "rb", buffering=0) as pipe:
            data = pipe.readall() or b""
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            _, status = os.waitpid(self._pid, 0)
            self._is_over = True
        return data, os.waitstatus_to_exitcode(status)


def _write_and_exit(make: Callable[[], bytes], writer: int, parent: int) -> NoReturn:
    """Run the copy's whole life. No handler and no clean-up of this process runs in it."""
    code = EXIT_FAILED
    try:
        signal.set_wakeup_fd(-1)  # It belongs to the parent.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)  # By SIGTERM, whose handler is gone.
        os.closerange(_FIRST_INHERITED, writer)
        os.closerange(writer + 1, _MOST_DESCRIPTORS)
        gc.disable()  # Collection would write to every object that it visits.
        left = memoryview(make())
        while left:
            left = left[os.write(writer, left) :]
        code = EXIT_OK
    finally:
        os._exit(code)
