"""Waiting for the client's calls so that no cancellation is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
import pytest

from shared.bus import requests


class Client:
    """Answers when told to, as nats-py does: with a wait of its own that may swallow a cancellation."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def request(self, subject: str, data: bytes, timeout: float | None, headers: dict[str, Any] | None) -> str:
        return await asyncio.wait_for(self.reply, timeout)

    async def flush(self) -> None:
        await asyncio.wait_for(self.reply, 10.0)


async def cancelled_with_the_reply(client: Client, waiting: asyncio.Task[Any]) -> bool:
    """Whether a task ends as cancelled when its cancellation comes in the same moment as what it waits for."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.reply.set_result("reply")
    waiting.cancel()
    await asyncio.wait({waiting})
    return waiting.cancelled()


async def test_a_cancelled_request_stays_cancelled() -> None:
    """Though the reply came."""
    client = Client()
    waiting = asyncio.create_task(requests.request(client, "subject", b"", 10.0))

    assert await cancelled_with_the_reply(client, waiting)


async def test_a_cancelled_call_stays_cancelled() -> None:
    """Though what the call waited for came."""
    client = Client()
    waiting = asyncio.create_task(requests.apart(client.flush()))

    assert await cancelled_with_the_reply(client, waiting)


async def test_a_request_without_a_reply_times_out() -> None:
    """As the client says it, and nothing is left waiting."""
    client = Client()

    with pytest.raises(nats.errors.TimeoutError):
        await requests.request(client, "subject", b"", 0.0)

    assert client.reply.cancelled()


async def test_a_call_tells_what_it_came_to() -> None:
    """What it returns, or what it raises."""

    async def fails() -> None:
        raise nats.errors.ConnectionClosedError

    client = Client()
    client.reply.set_result("reply")
    assert await requests.apart(client.request("subject", b"", None, None)) == "reply"
    with pytest.raises(nats.errors.ConnectionClosedError):
        await requests.apart(fails())
