"""Waiting for something that a test has no event for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

POLL_S = 0.005


async def until(claim: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return when ``claim`` holds; a test that waits in vain fails with TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not claim():
            await asyncio.sleep(POLL_S)


def holds(claim: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Whether ``claim`` came to hold in time, for tests of processes that run beside this one."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(10 * POLL_S)
    return True


def is_ready(base_url: str) -> bool:
    """Whether a gateway, or a router, is there and says that it can serve."""
    try:
        return httpx.get(f"{base_url}/health/ready", timeout=10, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
