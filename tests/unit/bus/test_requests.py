"""Waiting for the client's calls so that no cancellation is lost."""

from __future__ import annotations

import asyncio
import gc
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


async def test_what_tries_over_and_over_ends_with_its_time_though_it_misses_a_cancellation() -> None:
    """The first one is swallowed by a failed try, as nats-py may do while it connects."""
    missed = 0

    async def tries_for_ever() -> None:
        nonlocal missed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                missed += 1
                if missed == 3:
                    raise

    with pytest.raises(TimeoutError):
        await requests.within(tries_for_ever(), 0.0)

    assert missed == 3


async def test_what_fails_once_its_time_is_over_is_not_complained_of() -> None:
    """Its caller has an error already, so that nobody asks for another."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise nats.errors.ConnectionClosedError from None

    with pytest.raises(TimeoutError):
        await requests.within(fails_when_cancelled(), 0.0)
    await asyncio.sleep(0)  # The event loop lets go of it.
    gc.collect()

    assert complaints == []


async def test_who_is_cancelled_while_something_has_its_time_leaves_nothing_behind() -> None:
    """And stays cancelled; an error and a result come through."""
    client = Client()
    waiting = asyncio.create_task(requests.within(client.flush(), 10.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})

    assert waiting.cancelled()
    assert client.reply.cancelled()
    assert await requests.within(asyncio.sleep(0, "result"), 10.0) == "result"
    with pytest.raises(ZeroDivisionError):
        await requests.within(_fails(), 10.0)


async def _fails() -> None:
    raise ZeroDivisionError
