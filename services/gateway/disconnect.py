"""Noticing that a client went away, streaming or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class DisconnectWatch:
    """Listens on a request whose body has been read; calls back once when its client is gone."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
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
