"""Clients that go away, come in crowds, read slowly, or meet a gateway that is shutting down."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from shared.messages.tokens import TokenItem
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.waiting import until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def started(harness: Harness, count: int = 1) -> None:
    await harness.cell.until(lambda: len(harness.cell.submitted) >= count)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(stream: bool) -> None:
    """Streaming or not, before the first token or after it; and everything local is cleaned up."""
    async with running_gateway(over_http=True) as harness:
        async with httpx.AsyncClient(base_url=harness.base_url) as leaver:
            call = asyncio.create_task(leaver.post("/v1/chat/completions", json={**CHAT, "stream": stream, "n": 2}))
            await started(harness, 2)
            await harness.cell.emit(harness.cell.submitted[0], [(5, "x")])
            await until(lambda: harness.placed(harness.cell.submitted[0]) == 1)
            call.cancel()
        await harness.cell.until(lambda: len(harness.cell.cancelled) == 2)

        assert {c.request_id for c in harness.cell.cancelled} == {r.request_id for r in harness.cell.submitted}
        assert harness.cell.cancelled[0].reason == "client_disconnected"
        await until(lambda: harness.gateway.slots.used == 0)
        assert len(harness.gateway.dispatcher.pending) == 0


async def test_a_finished_request_is_not_cancelled() -> None:
    """Its client leaves after the answer, which is no reason."""
    async with running_gateway(says("hello"), over_http=True) as harness:
        async with httpx.AsyncClient(base_url=harness.base_url) as client:
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        # A cancellation of these would come before that of a later request, whose client does go away.
        harness.cell.script = None
        async with httpx.AsyncClient(base_url=harness.base_url) as leaver:
            call = asyncio.create_task(leaver.post("/v1/chat/completions", json=CHAT))
            await started(harness, 3)
            call.cancel()
        await harness.cell.until(lambda: bool(harness.cell.cancelled))

        assert [one.request_id for one in harness.cell.cancelled] == [harness.cell.submitted[2].request_id]


async def test_more_than_max_inflight_get_429() -> None:
    """With Retry-After; the others are answered, and slots come back."""
    async with running_gateway(over_http=True, max_inflight=3) as harness:
        calls = [asyncio.create_task(harness.client.post("/v1/chat/completions", json=CHAT)) for _ in range(3)]
        await started(harness, 3)
        refused = await harness.client.post("/v1/chat/completions", json=CHAT)
        too_many_choices = await harness.client.post("/v1/completions", json={"prompt": "hi", "n": 4})
        for request in harness.cell.submitted:
            await harness.cell.emit(request, [(5, "x")], finish="stop")
        answers = await asyncio.gather(*calls)

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert too_many_choices.status_code in (400, 429)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert harness.gateway.slots.used == 0


async def test_a_crowd_gets_typed_answers_and_nothing_is_lost() -> None:
    """Many more connections than slots: each is 200 with its whole text or 429, and the counts add up."""
    crowd, slots = 400, 64
    async with running_gateway(says("hello there"), over_http=True, max_inflight=slots) as harness:
        limits = httpx.Limits(max_connections=crowd, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=harness.base_url, limits=limits, timeout=60) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json={**CHAT, "stream": n % 2 == 0}) for n in range(crowd))
            )
        statuses = [answer.status_code for answer in answers]

        assert set(statuses) <= {200, 429}
        assert statuses.count(200) == len(harness.cell.submitted) >= slots
        for answer in answers:
            if answer.status_code == 429:
                assert "retry-after" in answer.headers
            else:
                assert "hello there" in _text(answer)
        assert harness.gateway.slots.used == 0


def _text(answer: httpx.Response) -> str:
    if answer.headers["content-type"] == "application/json":
        return str(answer.json()["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])


async def test_a_slow_reader_gets_few_large_chunks_and_every_token() -> None:
    """What arrives while it does not read is coalesced."""
    pieces = 5_000
    async with running_gateway(over_http=True) as harness:
        port = int(harness.base_url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await started(harness)
        request = harness.cell.submitted[0]
        for index in range(pieces):
            last = index == pieces - 1
            item = TokenItem(
                request_id=request.request_id, attempt=1, index=index, tokens=(5,), text="~" * 1000,
                finish="stop" if last else None,
            )  # fmt: skip
            await harness.cell.send([item], request.gateway_id)
            if index % 50 == 0:
                await asyncio.sleep(0)
        received = await asyncio.wait_for(reader.read(-1), 60)
        writer.close()

    assert b"~" * 1000 in received
    assert sum(part.count(b"~") for part in received.split(b"data: ")[1:]) == pieces * 1000
    assert received.count(b"data: ") < pieces // 2
    assert b"[DONE]" in received


async def test_a_reader_that_takes_nothing_is_let_go() -> None:
    """After the send timeout its request is cancelled and its slot is free."""
    async with running_gateway(over_http=True, send_timeout_ms=200) as harness:
        port = int(harness.base_url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await started(harness)
        request = harness.cell.submitted[0]
        for index in range(200):
            item = TokenItem(request_id=request.request_id, attempt=1, index=index, tokens=(5,), text="x" * 100_000)
            await harness.cell.send([item], request.gateway_id)
            await asyncio.sleep(0)
        await harness.cell.until(lambda: bool(harness.cell.cancelled))
        writer.close()

        assert harness.cell.cancelled[0].reason == "client_too_slow"
        await until(lambda: harness.gateway.slots.used == 0)


@pytest.mark.parametrize(
    ("settings", "tokens", "code"),
    [
        ({"first_token_timeout_ms": 100}, 0, "first_token_timeout"),
        ({"idle_timeout_ms": 100}, 1, "idle_timeout"),
        ({"request_timeout_ms": 100}, 1, "request_timeout"),
    ],
)
async def test_every_wait_ends_with_504_and_a_cancellation(settings: dict[str, Any], tokens: int, code: str) -> None:
    """A cell that says nothing more does not hold a client for ever."""
    async with running_gateway(over_http=True, **settings) as harness:
        call = asyncio.create_task(harness.client.post("/v1/completions", json={"prompt": "hi"}))
        await started(harness)
        if tokens:
            await harness.cell.emit(harness.cell.submitted[0], [(5, "x")])
        response = await call
        await harness.cell.until(lambda: bool(harness.cell.cancelled))

    assert (response.status_code, response.json()["error"]["code"]) == (504, code)


async def test_a_stream_without_a_token_starts_and_is_kept_alive() -> None:
    """Headers come after a while, then blank lines, then the role and the answer."""
    async with (
        running_gateway(over_http=True, stream_start_ms=50, keepalive_ms=50) as harness,
        harness.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        blank = [await anext(lines) for _ in range(4)]
        await harness.cell.emit(harness.cell.submitted[0], [(5, "late")], finish="stop")
        role, answer, *_ = [json.loads(line[6:])["choices"][0]["delta"] async for line in lines if line.endswith("}")]

    assert blank == [""] * 4
    assert role["role"] == "assistant"
    assert answer["content"] == "late"


async def test_a_graceful_end_lets_streams_finish_and_takes_no_new_ones() -> None:
    """Ready is 503 and new requests are refused, while the running one goes on to its end."""
    async with running_gateway(over_http=True, grace_ms=20_000) as harness:
        running = asyncio.create_task(harness.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await started(harness)
        await harness.cell.emit(harness.cell.submitted[0], [(5, "first ")])
        harness.life.stop()
        await until(lambda: harness.gateway.cell.is_draining)
        ready = await harness.client.get("/health/ready")
        live = await harness.client.get("/health/live")
        refused = await harness.client.post("/v1/chat/completions", json=CHAT)
        await harness.cell.emit(harness.cell.submitted[0], [(6, "last")], index=1, finish="stop")
        answer = await running

    assert (ready.status_code, live.status_code, refused.status_code) == (503, 200, 503)
    assert "shutting down" in ready.json()["reasons"][0]
    assert "retry-after" in refused.headers
    assert _text(answer) == "first last"
    assert harness.cell.cancelled == []


async def test_what_outlasts_the_grace_ends_with_a_typed_error() -> None:
    """Streams with an error event, others with 503; their requests are cancelled."""
    async with running_gateway(over_http=True, grace_ms=50) as harness:
        stream = asyncio.create_task(harness.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await started(harness)
        whole = asyncio.create_task(harness.client.post("/v1/chat/completions", json=CHAT))
        await started(harness, 2)
        await harness.cell.emit(harness.cell.submitted[0], [(5, "x")])
        await until(lambda: harness.taken(harness.cell.submitted[0]) == 1)
        harness.life.stop()
        streamed, refused = await asyncio.gather(stream, whole)
        await harness.cell.until(lambda: len(harness.cell.cancelled) == 2)

    assert streamed.status_code == 200
    assert '"error"' in streamed.text
    assert "[DONE]" in streamed.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")


async def test_tokens_for_many_streams_in_one_message_reach_them_all() -> None:
    """One message a step carries every stream's token."""
    streams = 100
    async with running_gateway(over_http=True) as harness:
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(base_url=harness.base_url, limits=limits, timeout=60) as client:
            calls = [
                asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
                for _ in range(streams)
            ]
            await started(harness, streams)
            for index in range(20):
                items = [
                    TokenItem(
                        request_id=request.request_id, attempt=1, index=index, tokens=(5,), text=f"{index},",
                        finish="stop" if index == 19 else None,
                    )
                    for request in harness.cell.submitted
                ]  # fmt: skip
                await harness.cell.send(items, harness.gateway.gateway_id)
                await asyncio.sleep(0)
            answers = await asyncio.gather(*calls)

    assert {_text(answer) for answer in answers} == {"".join(f"{index}," for index in range(20))}
