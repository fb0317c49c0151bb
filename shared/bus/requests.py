"""Calls of nats-py, with waits that can be cancelled at any moment.

nats-py waits by ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation that comes together with what is
waited for. A loop that was cancelled then goes on for ever, and whoever waits for its end does, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import nats.errors

T = TypeVar("T")


async def request(
    client: Any, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """One request's reply. Raises what the client's own ``request`` raises, ``nats.errors.TimeoutError`` among it."""
    try:
        async with asyncio.timeout(timeout_s):
            return await client.request(subject, data, timeout=None, headers=dict(headers) if headers else None)
    except TimeoutError as error:
        raise nats.errors.TimeoutError from error


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """What ``call`` returns or raises. It runs in a task of its own, so that only that can miss a cancellation."""
    running = asyncio.create_task(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        raise
