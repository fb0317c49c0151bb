"""One request and what comes of it, with a scripted server."""

import json
from typing import Any

import httpx
import pytest

from thermocline.chaos.client import Manner, Reply, ask
from thermocline.chaos.verdicts import SILENCE, TRANSPORT
from thermocline.chaos.workload import Known

KNOWN = Known("s0.0", "/v1/completions", {"prompt": "p"}, (5, 6, 7), "abc", "length")
WHOLE = Manner(is_stream=False)
STREAM = Manner(is_stream=True)
EVENTS = (
    {"choices": [{"index": 0, "token_ids": [5], "text": "a", "finish_reason": None}]},
    {"choices": [{"index": 0, "token_ids": [6], "text": "b", "finish_reason": None}]},
    {"choices": [{"index": 0, "token_ids": [7], "text": "c", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
)


def sse(*events: dict[str, Any] | str) -> httpx.Response:
    """A stream of these events, with a comment before them as a keep-alive has it."""
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text=": waiting\n\n" + "".join(lines))


async def reply_to(response: httpx.Response | Exception, manner: Manner) -> tuple[Reply, dict[str, Any]]:
    """What ``ask`` makes of a response, and the body that it sent."""
    sent: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        sent.update(json.loads(request.content))
        if isinstance(response, Exception):
            raise response
        return response

    async with httpx.AsyncClient(base_url="http://cell", transport=httpx.MockTransport(answer)) as client:
        return await ask(client, KNOWN, manner), sent


async def test_a_whole_stream_is_answered() -> None:
    """With its tokens counted, and asked for as a stream with usage."""
    reply, sent = await reply_to(sse(*EVENTS, "[DONE]"), STREAM)

    assert (reply.ending, reply.tokens, reply.error) == ("answered", 3, None)
    assert reply.ttft_s > 0
    assert sent == {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}


async def test_a_whole_answer_is_answered() -> None:
    """Without streaming, and with the deadline that was asked for."""
    choice = {"index": 0, "token_ids": [5, 6, 7], "text": "abc", "finish_reason": "length"}

    reply, sent = await reply_to(httpx.Response(200, json={"choices": [choice]}), Manner(False, deadline_ms=9))

    assert reply.ending == "answered"
    assert sent == {"prompt": "p", "deadline_ms": 9}


async def test_a_client_goes_away_when_it_wanted_to() -> None:
    """After as many tokens."""
    reply, _ = await reply_to(sse(*EVENTS, "[DONE]"), Manner(True, leaves_after=2))

    assert (reply.ending, reply.tokens) == ("left", 2)


@pytest.mark.parametrize(
    "response",
    [
        sse(*EVENTS[:2], EVENTS[1], "[DONE]"),
        sse(*EVENTS[:2], "[DONE]"),
        sse(*EVENTS, "[DONE]", EVENTS[0]),
        sse(*EVENTS, "[DONE]", "[DONE]"),
        sse("no json"),
    ],
    ids=["repeat", "short", "more after the end", "two ends", "garbage"],
)
async def test_what_is_wrong_with_a_stream_is_found(response: httpx.Response) -> None:
    """By whatever it is wrong."""
    reply, _ = await reply_to(response, STREAM)

    assert reply.ending == "wrong"
    assert reply.wrong


async def test_a_stream_that_breaks_off_is_a_broken_connection() -> None:
    """Whatever came before was right."""
    reply, _ = await reply_to(sse(*EVENTS[:2]), STREAM)

    assert reply.ending == "error"
    assert reply.error is not None
    assert (reply.error.code, reply.tokens) == (TRANSPORT, 2)


async def test_errors_say_whether_to_try_again() -> None:
    """Before a stream by status and header, in a stream by code."""
    body = {"error": {"code": "service_unavailable", "message": "later"}}

    for manner in (WHOLE, STREAM):
        reply, _ = await reply_to(httpx.Response(503, json=body, headers={"retry-after": "1"}), manner)
        assert reply.error is not None
        assert (reply.error.code, reply.error.status, reply.error.retry_after_s) == ("service_unavailable", 503, 1)
    reply, _ = await reply_to(sse(EVENTS[0], body), STREAM)
    assert reply.error is not None
    assert (reply.error.code, reply.error.status, reply.tokens) == ("service_unavailable", 0, 1)


async def test_silence_and_refusal_are_told_apart() -> None:
    """A server that says nothing for long is not one that is away."""
    silent, _ = await reply_to(httpx.ReadTimeout("slow"), WHOLE)
    away, _ = await reply_to(httpx.ConnectError("refused"), STREAM)

    assert silent.error is not None
    assert away.error is not None
    assert (silent.error.code, away.error.code) == (SILENCE, TRANSPORT)
