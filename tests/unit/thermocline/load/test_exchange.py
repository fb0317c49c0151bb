"""One request, and what is read of the stream that answers it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.thermocline.load.scripted_server import (
    LAST,
    TOKEN,
    WHOLE,
    Answer,
    ScriptedHttp,
    refusal,
    sse,
    stream,
    usage,
)
from tests.unit.thermocline.load.virtual_time import VirtualTime
from thermocline.client import RequestError
from thermocline.load.exchange import AnswerFold, EventSplitter, Refused, exchange
from thermocline.load.prompts import Said
from thermocline.load.reply import Reply


async def ask(answer: Answer | RequestError, timeout_s: float = 60.0) -> Reply:
    """The reply to a request that was due a second before it was sent."""
    clock = VirtualTime()
    reply = Reply(0, clock.now_s() - 1, clock.now_s())
    await exchange(ScriptedHttp(lambda path, body: answer, clock), "/v1/completions", b"{}", reply, clock, timeout_s)
    return reply


def test_events_are_cut_wherever_the_bytes_were() -> None:
    """Byte by byte, with either line ending, and without what is no data."""
    data = b": waiting\r\n\r\ndata: {1}\r\n\r\nevent: x\ndata:{2}\n\ndata: [DONE]\n\n"
    splitter = EventSplitter()

    found = [event for byte in data for event in splitter.feed(bytes([byte]))]

    assert found == [b"{1}", b"{2}", b"[DONE]"]


def test_an_event_without_an_end_is_refused() -> None:
    """Or a broken server could fill the client's memory."""
    splitter = EventSplitter()

    with pytest.raises(RequestError, match="bad_stream"):
        splitter.feed(b"data: " + b"x" * 2**25)


def test_every_message_with_tokens_is_timed() -> None:
    """First token from when the request was due, gaps between messages, and the mean time of a later token."""
    reply = Reply(0, 10.0, 10.5)
    fold = AnswerFold(reply)
    for data, now_s in ((TOKEN, 12.0), (TOKEN, 12.5), (usage(7, 5), 13.0), (LAST, 14.0)):
        fold.event(sse(data).split(b"data: ")[1], now_s)

    fold.end(14.25)

    assert (reply.ttft_s, reply.end_to_end_s, reply.token_s) == (2.0, 4.25, 0.5)
    assert list(reply.gaps_s) == [0.5, 1.5]
    assert reply.said == Said([5, 5, 6], "aab")


async def test_an_answer_has_the_servers_counts() -> None:
    """Prompt, answer, and how much was cached."""
    reply = await ask(stream(TOKEN, LAST, usage(10, 2, prompt_tokens_details={"cached_tokens": 8}), "[DONE]"))

    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (10, 2, 8)


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
async def test_a_server_that_says_nothing_of_its_cache_is_not_one_without(details: dict[str, Any]) -> None:
    """Unknown is not 0."""
    reply = await ask(stream(LAST, usage(10, 1, **details), "[DONE]"))

    assert reply.cached_tokens is None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (stream(TOKEN, LAST, "[DONE]"), 2),
        (stream(TOKEN, LAST), 2),
        (stream({"choices": [{"finish_reason": "stop"}]}), 0),
    ],
    ids=["no usage", "no [DONE]", "no text"],
)
async def test_other_servers_streams_are_understood(answer: Answer, tokens: int) -> None:
    """What they leave out is counted here."""
    reply = await ask(answer)

    assert reply.output_tokens == tokens
    assert reply.ended_s >= reply.first_s > 0


async def test_a_chat_is_read_too() -> None:
    """Thoughts are tokens, but no part of what was said."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "yes"}]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]

    reply = await ask(stream(*events, {"choices": [{"finish_reason": "stop"}]}, "[DONE]"))

    assert reply.said.text == "yes"
    assert reply.output_tokens == 2


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (stream(TOKEN), "stream_ended_early"),
        (stream(TOKEN, "[DONE]"), "stream_ended_early"),
        (stream("no json"), "bad_stream"),
        (stream(TOKEN, {"error": {"code": "internal_error", "message": "x"}}), "internal_error"),
        (stream({"error": "out of luck"}), "error_in_stream"),
        (refusal(429, "queue_full"), "queue_full"),
        (refusal(500), "http_500"),
        (Answer((b'{"object":"error","message":"bad","code":400}',), 400), "http_400"),
        (Answer((b"<html>\xff",), 502), "http_502"),
        (RequestError("connection_refused", "x"), "connection_refused"),
    ],
)
async def test_errors_have_kinds(answer: Answer | RequestError, code: str) -> None:
    """The server's own code where it has one."""
    with pytest.raises(RequestError) as caught:
        await ask(answer)

    assert caught.value.code == code


async def test_a_refusal_says_when_to_come_back() -> None:
    """In seconds, where the header is a number."""
    waits = []
    for header in ({"retry_after": "3"}, {"retry_after": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}):
        with pytest.raises(Refused) as caught:
            await ask(refusal(503, "unavailable", **header))
        waits.append(caught.value.retry_after_s)

    assert waits == [3.0, None, None]


@pytest.mark.parametrize("said", [(), (sse(TOKEN),), (sse(TOKEN, TOKEN),)])
async def test_a_server_that_goes_silent_is_not_waited_for(said: tuple[bytes, ...]) -> None:
    """Wherever in the answer."""
    with pytest.raises(RequestError, match="timeout: no whole answer"):
        await ask(Answer(said, hangs=True), timeout_s=0.02)


async def test_a_server_that_only_fails_to_hang_up_has_answered() -> None:
    """With or without its last word."""
    for said in (WHOLE, sse(TOKEN, LAST)):
        assert (await ask(Answer((said,), hangs=True), timeout_s=0.02)).output_tokens == 2
