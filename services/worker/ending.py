"""The reason why an incarnation ends, reported by any of its parts."""

from __future__ import annotations

import asyncio


class Ending:
    """Holds the first reason to end this incarnation. Owned by the event loop."""

    def __init__(self) -> None:
        """Begin without a reason."""
        self._reason: Exception | None = None
        self._is_given = asyncio.Event()

    def end(self, reason: Exception) -> None:
        """End this incarnation; the first reason counts."""
        self._reason = self._reason or reason
        self._is_given.set()

    async def wait(self) -> None:
        """Raise the reason as soon as there is one."""
        await self._is_given.wait()
        assert self._reason is not None
        raise self._reason
