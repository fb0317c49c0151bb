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
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._on_gone()
                return

    def close(self) -> None:
        """Stop listening; idempotent."""
        # The cancelled task refers to this object, and what ``on_gone`` holds is to be freed without the collector.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
