"""Detection of clients that disconnect, while streaming or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class DisconnectWatch:
    """A listener for the disconnection of a request's client."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        """Listen from now on, in a task of the running event loop.

        ``receive`` is that of a request whose body has been read; no other reader may call it meanwhile. ``on_gone`` is
        called once, when the client disconnects.
        """
        self._receive = receive
        self._on_gone = on_gone
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._on_gone()
                return

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._task.cancel()
