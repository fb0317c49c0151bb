"""Calls of nats-py, with waits that can be cancelled at any moment.

nats-py waits by ``asyncio.wait_for``, which in Python 3.11 swallows a cancellation that comes together with the awaited
result. A cancelled loop then goes on without end, and so does the task that waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

import nats.errors

from shared.errors import PayloadTooLarge, Unavailable

T = TypeVar("T")

_CANCEL_AGAIN_S = 0.05


async def request(
    client: Any, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Return the reply to one request.

    Raises the errors of the client's own ``request``, ``nats.errors.TimeoutError`` included.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await client.request(subject, data, timeout=None, headers=dict(headers) if headers else None)
    except TimeoutError as error:
        raise nats.errors.TimeoutError from error


async def translated(operation: Awaitable[T]) -> T:
    """Return the result of ``operation``, with errors of nats-py translated to ours."""
    try:
        return await operation
    except nats.errors.MaxPayloadError as error:
        raise PayloadTooLarge("the message exceeds the broker's max_payload") from error
    except nats.errors.NoRespondersError as error:
        raise Unavailable("no process serves this subject") from error
    except nats.errors.TimeoutError as error:
        raise Unavailable("no answer in time") from error
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"the message broker failed: {error!r}") from error


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """Return or raise the result of ``call``, which runs in a task of its own: only that can miss a cancellation."""
    running = asyncio.create_task(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        raise


async def within(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return or raise the result of ``call``; raise TimeoutError when it takes longer. It has always ended afterwards.

    It is cancelled repeatedly: a retry loop may miss one cancellation in a failed try.
    """
    running = asyncio.create_task(call)
    try:
        done, _ = await asyncio.wait({running}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        return running.result()
    finally:
        while not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=_CANCEL_AGAIN_S)
        if not running.cancelled():
            running.exception()  # Retrieve what it failed with when it was cut off, which no other code asks for.
