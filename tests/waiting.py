"""Waiting for something that a test has no event for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

POLL_S = 0.005


async def until(claim: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when ``claim`` holds; a test that waits in vain fails with TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not claim():
            await asyncio.sleep(POLL_S)
