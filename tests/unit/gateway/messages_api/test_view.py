"""How answers of the Messages API are written; Anthropic's own types read every event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from services.gateway.messages_api.answers import UNFINISHED
from services.gateway.messages_api.view import SIGNATURE, MessagesView
from services.gateway.pending import Generation
from shared.errors import InternalError, QueueFull
from shared.messages.requests import CacheHints, Lease
from shared.messages.tokens import Usage
from tests.unit.gateway.scripted_replies import generation, hear, say

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
MINUTES, HOUR = 300_000, 3_600_000


def view_of(made: Generation, **more: Any) -> MessagesView:
    return MessagesView(made, "msg-1", "m", **{"max_tokens": 64, **more})


def events_of(data: bytes) -> list[Any]:
    """Every event but pings, as Anthropic's client has it; names and types agree."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            found.append(EVENTS.validate_python(event))
    return found


def streamed(view: MessagesView, made: Generation, *letters: str) -> list[Any]:
    """All events of an answer of these deltas."""
    data = b"".join(view.opening())
    for number, each in enumerate(letters):
        finish = "stop" if number == len(letters) - 1 else None
        data += view.chunk(made.choices[0], say(made.choices[0], each, finish)) or b""  # type: ignore[arg-type]
    return events_of(data + b"".join(view.closing()))


def test_blocks_follow_one_another() -> None:
    """Reasoning, text and two calls: each begins, grows and ends before the next."""
    made = generation()
    events = streamed(view_of(made), made, "r", "Rt", "Tca", "Ad")

    told = [(event.type, getattr(event, "index", None)) for event in events]
    assert told == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[4].delta.signature == SIGNATURE
    assert events[10].content_block.name == "weather"
    assert events[11].delta.partial_json + events[12].delta.partial_json == '{"city": "Oslo"}'
    assert events[-2].delta.stop_reason == "tool_use"


def test_a_whole_answer_has_the_same_blocks() -> None:
    """With the calls' arguments as objects."""
    made = generation()
    hear(made.choices[0], "rRtTcaAd", "stop")
    answer = Message.model_validate_json(view_of(made).whole())

    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    first, second, third, last = answer.content
    assert (first.type, getattr(first, "thinking", "")) == ("thinking", "let me think")
    assert getattr(second, "text", "") == "Hello there"
    assert (getattr(third, "id", ""), getattr(third, "input", {})) == ("call_0", {"city": "Oslo"})
    assert getattr(last, "input", None) == {}
    assert answer.stop_reason == "tool_use"


def test_an_unfinished_call_is_given_as_it_stands() -> None:
    """Under a name that says that it is no JSON; the answer ended at its bound."""
    made = generation()
    hear(made.choices[0], "ca", "length")
    answer = Message.model_validate_json(view_of(made).whole())

    assert getattr(answer.content[0], "input", None) == {UNFINISHED: '{"city":'}
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize("letters", ["ca", "caA"])
def test_a_stop_sequence_is_the_reason_behind_a_call_too(letters: str) -> None:
    """It may have cut the call off, and tool_use would have the client run it."""
    made = generation()
    hear(made.choices[0], letters, "stop", stop="}")
    answer = Message.model_validate_json(view_of(made).whole())

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "}")


def test_thinking_can_be_hidden() -> None:
    """Its block stays, empty, so that the conversation can go on."""
    made = generation()
    events = streamed(view_of(made, hides_thinking=True), made, "rR", "t")

    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["signature_delta", "text_delta"]


@pytest.mark.parametrize(
    ("leases", "cached", "created", "of_an_hour", "rest"),
    [
        ((), 4, 0, 0, 6),
        ((Lease(tokens=8, ttl_ms=MINUTES),), 4, 4, 0, 2),
        ((Lease(tokens=6, ttl_ms=HOUR), Lease(tokens=8, ttl_ms=MINUTES)), 4, 4, 2, 2),
        ((Lease(tokens=4, ttl_ms=HOUR),), 4, 0, 0, 6),
        ((Lease(tokens=10, ttl_ms=HOUR),), 0, 10, 10, 0),
    ],
)
def test_usage_divides_the_prompt(
    leases: tuple[Lease, ...], cached: int, created: int, of_an_hour: int, rest: int
) -> None:
    """What was found, what was written up to the last breakpoint, and the rest."""
    made = generation(prompt_tokens=10, cache=CacheHints(leases=leases))
    hear(made.choices[0], "t", "stop", Usage(device_tokens=cached, computed_tokens=10 - cached))
    usage = Message.model_validate_json(view_of(made).whole()).usage

    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens) == (
        cached,
        created,
        rest,
    )
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens == of_an_hour
    assert usage.cache_creation.ephemeral_5m_input_tokens == created - of_an_hour


@pytest.mark.parametrize(("error", "kind"), [(InternalError("x"), "api_error"), (QueueFull("x"), "overloaded_error")])
def test_a_broken_stream_ends_with_an_error(error: Any, kind: str) -> None:
    """In Anthropic's shape and under its name."""
    data = view_of(generation()).failed(error)

    name, body = data.decode().split("\n")[:2]
    assert name == "event: error"
    assert json.loads(body.removeprefix("data: "))["error"]["type"] == kind


def test_a_quiet_stream_is_pinged() -> None:
    """By an event, as clients of this API expect."""
    assert MessagesView.framing.keepalive == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert MessagesView.framing.end == b""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_is_only_to_be_cached_has_no_answer(is_streamed: bool) -> None:
    """The one token that a worker generates is not told, and not counted."""
    made = generation()
    view = view_of(made, max_tokens=0)
    if is_streamed:
        *_, last, _ = streamed(view, made, "t")
        told, usage = last.delta.stop_reason, last.usage
    else:
        hear(made.choices[0], "t", "length")
        whole = Message.model_validate_json(view.whole())
        assert whole.content == []
        told, usage = whole.stop_reason, whole.usage

    assert (told, usage.output_tokens) == ("max_tokens", 0)
