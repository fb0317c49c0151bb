"""How responses are written; OpenAI's own types read every event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.pending import Generation
from services.gateway.responses.schema import ReasoningOptions, ResponseObject, TextOptions
from services.gateway.responses.view import ResponsesView
from shared.errors import InternalError, QueueFull
from tests.unit.gateway.running_gateway import tokenizer
from tests.unit.gateway.scripted_replies import generation, hear, say

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BEGUN = ResponseObject(
    id="resp_" + "0" * 40, created_at=1, status="in_progress", instructions=None, max_output_tokens=None, metadata={},
    model="m", output=[], parallel_tool_calls=True, previous_response_id=None, prompt_cache_key=None,
    reasoning=ReasoningOptions(), safety_identifier=None, store=True, temperature=1.0, text=TextOptions(),
    tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0, user=None,
)  # fmt: skip


def view_of(made: Generation) -> ResponsesView:
    return ResponsesView(made, BEGUN, logprobs=None, texts=tokenizer().texts, now_ns=lambda: 5 * 10**9)


def events_of(data: bytes) -> list[Any]:
    """Every event, as OpenAI's client has it; names and types agree, and numbers have no gap."""
    found = []
    for number, block in enumerate(data.decode().split("\n\n")[:-1]):
        name, _, body = block.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(EVENTS.validate_python(event))
    return found


def streamed(*letters: str, finish: Any = "stop") -> list[Any]:
    """All events of an answer of these deltas."""
    made = generation()
    view, choice = view_of(made), made.choices[0]
    data = b"".join(view.opening())
    for number, each in enumerate(letters):
        data += view.chunk(choice, say(choice, each, finish if number == len(letters) - 1 else None)) or b""
    view.finish()
    return events_of(data + b"".join(view.closing()))


def test_items_follow_one_another() -> None:
    """Reasoning, text and a call, each with the events that OpenAI has for it."""
    events = streamed("r", "Rt", "Tca", "A")

    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.item.status for event in events if event.type == "response.output_item.added"] == ["in_progress"] * 3
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["reasoning", "message", "function_call"]
    assert [item.status for item in done] == ["completed"] * 3
    assert done == events[-1].response.output
    assert (done[2].call_id, done[2].name, done[2].arguments) == ("call_0", "weather", '{"city": "Oslo"}')
    assert events[-1].response.output_text == "Hello there"
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {item.id for item in done}


def test_an_answer_that_is_cut_is_incomplete() -> None:
    """And so is the item that it ended in."""
    events = streamed("t", "ca", finish="length")

    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in last.response.output] == ["completed", "incomplete"]
    assert events[-2].item.status == "incomplete"


def test_a_whole_answer_has_the_same_items() -> None:
    """All at once."""
    made = generation()
    hear(made.choices[0], "rRtTcaAd", "stop")
    view = view_of(made)
    view.finish()
    response = Response.model_validate_json(view.whole())

    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "Hello there"
    assert (response.status, response.completed_at) == ("completed", 5)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("error", "code"), [(InternalError("broken"), "server_error"), (QueueFull("full"), "rate_limit_exceeded")]
)
def test_a_broken_answer_fails_with_what_there_is(error: Any, code: str) -> None:
    """As the last event."""
    made = generation()
    view, choice = view_of(made), made.choices[0]
    data = b"".join(view.opening()) + (view.chunk(choice, say(choice, "t")) or b"")
    last = events_of(data + view.failed(error))[-1]

    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", code)
    assert last.response.output_text == "Hello"
