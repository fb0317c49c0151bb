"""Long bodies are decoded so that the event loop goes on between two of them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest
from starlette.requests import Request
from starlette.types import Message

from services.gateway import body
from services.gateway.openai_schema.chat import ChatRequest
from shared.errors import TooManyConnections

LONG = b'{"messages":[{"role":"user","content":"' + b"a" * 300_000 + b'"}]}'
TURNS_OF_AN_ANSWER = 6
"""Of the loop, that a token takes from the broker to its client, and no more."""


async def test_between_two_long_bodies_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs several turns of the loop waits for one decoding, not for one in each turn."""
    decode, events = body.decode_body, list[str]()

    def noting(data: body.Body, schema: type[ChatRequest]) -> ChatRequest:
        events.append("decoded")
        return decode(data, schema)

    async def answer() -> None:
        for _ in range(TURNS_OF_AN_ANSWER):
            await asyncio.sleep(0)
        events.append("answered")

    monkeypatch.setattr(body, "decode_body", noting)
    bodies = body.Bodies(2**20, 1.0, 2**24)
    decoding = [asyncio.create_task(bodies.decode(LONG, ChatRequest)) for _ in range(4)]
    while not events:
        await asyncio.sleep(0)
    await asyncio.create_task(answer())
    await asyncio.gather(*decoding)

    assert events == ["decoded", "answered", "decoded", "decoded", "decoded"]


async def test_values_are_counted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy lets go of the interpreter's lock in each part, and whatever counts waits for other threads to get it."""
    counting, counted = body._check_values, list[int]()

    def noting(data: body.Body) -> None:
        counted.append(threading.get_ident())
        counting(data)

    monkeypatch.setattr(body, "_check_values", noting)
    longer = LONG.replace(b"a" * 300_000, b"a" * 1_200_000)
    await body.Bodies(2**21, 1.0, 2**24).decode(longer, ChatRequest)

    assert len(counted) == 1
    assert counted != [threading.get_ident()]


async def test_a_long_body_does_not_wait_for_the_turns_behind_it() -> None:
    """Only the next one does: its own request goes on as soon as it is decoded."""
    bodies = body.Bodies(2**20, 1.0, 2**24)
    one, other = (asyncio.create_task(bodies.decode(LONG, ChatRequest)) for _ in range(2))
    await asyncio.sleep(0)

    assert one.done()
    assert not other.done()
    await other


def sent_by(tenant: str, nbytes: int) -> Request:
    """A request whose whole body is there."""

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(nbytes), "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "headers": headers, "state": {"tenant": tenant}}, receive)


async def test_one_tenant_holds_half_of_the_memory_for_bodies() -> None:
    """Its slow uploads do not shut out others'; without keys callers cannot be told apart."""
    bodies = body.Bodies(2**17, 1.0, 2**20)

    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(bodies.read(sent_by("flood", 2**17)))
        with pytest.raises(TooManyConnections, match="of your key's tenant take"):
            await held.enter_async_context(bodies.read(sent_by("flood", 2**17)))
        for tenant in ("other", "", "", ""):
            await held.enter_async_context(bodies.read(sent_by(tenant, 2**17)))
        with pytest.raises(TooManyConnections, match="request bodies take"):
            await held.enter_async_context(bodies.read(sent_by("third", 2**17)))

    assert bodies.held_bytes == 0
    async with bodies.read(sent_by("flood", 2**17)):
        assert bodies.held_bytes == 2**17
