"""Calls in threads that are not waited for any more, and the memory that they may still use.

A thread cannot be stopped. A buffer that such a call uses is given back when the call ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class Abandoned:
    """The abandoned calls under way. Owned by the event loop."""

    def __init__(self) -> None:
        """Begin with no abandoned calls."""
        self._running: dict[asyncio.Future[Any], list[int]] = {}  # Addresses of the buffers that each call uses.

    def __len__(self) -> int:
        """Return the number of calls under way."""
        return len(self._running)

    def add(self, call: asyncio.Future[Any], uses: Iterable[memoryview]) -> None:
        """Note a call that is not waited for any more, and the beginnings of buffers that it uses."""
        self._running[call] = [_address(buffer) for buffer in uses]

        def ended(call: asyncio.Future[Any]) -> None:
            del self._running[call]
            if not call.cancelled():
                call.exception()  # Retrieve its exception, which no other code asks for.

        call.add_done_callback(ended)

    def when_free(self, buffer: memoryview, then: Callable[[], None]) -> None:
        """Call ``then`` once no call uses a buffer: now, or when the last of them ends."""
        address = _address(buffer) if self._running else 0
        call = next((call for call, addresses in self._running.items() if address in addresses), None)
        if call is None:
            then()
        else:
            call.add_done_callback(lambda _: self.when_free(buffer, then))


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
