"""A turn of a message thread sends only what is new, and is answered as the whole conversation is."""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest

from services.gateway.kept_entries import KeptEntries
from services.gateway.messages_api.answers import OutputBlock, TextBlock, ThinkingBlock, ToolUseBlock
from services.gateway.messages_api.conversion import chat_request
from services.gateway.messages_api.schema import MessagesRequest, MessageThread
from services.gateway.messages_api.threads import KeptThreads
from services.gateway.messages_api.view import MessagesView
from services.gateway.responses.ids import is_message_id, new_message_id
from shared.bus.protocol import StreamLimits
from shared.errors import TransportError, Unavailable
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.responses.test_kept import account, here
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_replies import generation, hear

TEXT = "the quick brown fox"
SYSTEM = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}


def turn(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}


def said() -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": TEXT}]}


async def ask(harness: Harness, *messages: dict[str, Any], key: str = "", **fields: Any) -> Any:
    """The answer's JSON, with its status."""
    body = {"max_tokens": 50, "messages": list(messages), **fields}
    answer = await harness.client.post("/v1/messages", json=body, headers={"x-api-key": key} if key else {})
    return {"status": answer.status_code, **answer.json()}


def go_on(answer: Any) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": answer["id"]}


def prompt_tokens(usage: dict[str, Any]) -> int:
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[part] for part in parts)


async def counted(harness: Harness, *messages: dict[str, Any], **fields: Any) -> int:
    answer = await harness.client.post("/v1/messages/count_tokens", json={"messages": list(messages), **fields})
    count: int = answer.json()["input_tokens"]
    return count


async def test_a_thread_goes_on_as_the_whole_conversation_would() -> None:
    """At another gateway, too; breakpoints of its system prompt stay, and those of its earlier messages do not."""
    broker = MemoryBroker()
    async with running_gateway(says(TEXT), broker=broker) as harness:
        first = await ask(harness, turn("one"), system=SYSTEM, thread={"type": "create"})
    async with running_gateway(says(TEXT), broker=broker) as harness:
        second = await ask(harness, turn("two"), thread=go_on(first))
        third = await ask(harness, turn("three"), thread=go_on(second))
        leases = harness.cell.submitted[-1].cache.leases
        whole = [turn("one"), said(), turn("two"), said(), turn("three")]
        expected = await counted(harness, *whole, system=SYSTEM)

    assert [is_message_id(answer["id"]) for answer in (first, second, third)] == [True] * 3
    assert prompt_tokens(third["usage"]) == expected
    assert len(leases) == 2


async def test_anthropics_client_threads_a_conversation() -> None:
    """Its helper sends each message once, and all of them again when the thread is gone."""
    sent: list[int] = []
    async with (
        running_gateway(says(TEXT), over_http=True) as harness,
        anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client,
    ):
        thread = client.beta.messages.thread(model="test-model", max_tokens=50, system="Be short.")
        for text in ("one", "two"):
            answer = await thread.send({"role": "user", "content": text})
            sent.append(prompt_tokens(answer.usage.to_dict()))
        await harness.gateway.entries.erase_all(None, None)
        last = await thread.send({"role": "user", "content": "three"})
        messages = [*thread.messages][:-1]
        expected = await client.messages.count_tokens(model="test-model", system="Be short.", messages=messages)  # type: ignore[arg-type]

    assert prompt_tokens(last.usage.to_dict()) == expected.input_tokens
    assert sent[0] < sent[1] < expected.input_tokens


async def test_a_streamed_answer_is_kept_as_well() -> None:
    """Before its last event, so that the next turn finds it."""
    async with (
        running_gateway(says(TEXT), over_http=True) as harness,
        anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client,
    ):
        thread = client.beta.messages.thread(model="test-model", max_tokens=50)
        async with thread.stream({"role": "user", "content": "one"}) as stream:
            first = await stream.get_final_message()
        second = await thread.send({"role": "user", "content": "two"})
        messages: list[Any] = [{"role": "user", "content": "one"}, said(), {"role": "user", "content": "two"}]
        expected = await client.messages.count_tokens(model="test-model", messages=messages)

    assert prompt_tokens(second.usage.to_dict()) == expected.input_tokens
    assert second.id != first.id


async def test_what_is_no_thread_of_the_callers_is_not_found() -> None:
    """Another key's, another salt's, one that was continued, and any other text: its client sends all of it again."""
    async with running_gateway(says(TEXT), api_keys=("mine-0123456789", "other-0123456789")) as harness:
        first = await ask(harness, turn("one"), key="mine-0123456789", thread={"type": "create"})
        found = [
            await ask(harness, turn("two"), key="other-0123456789", thread=go_on(first)),
            await ask(harness, turn("two"), key="mine-0123456789", cache_salt="s", thread=go_on(first)),
            await ask(harness, turn("two"), key="mine-0123456789", thread=go_on({"id": new_message_id("")})),
            await ask(harness, turn("two"), key="mine-0123456789", thread=go_on({"id": "*"})),
        ]
        second = await ask(harness, turn("two"), key="mine-0123456789", thread=go_on(first))
        found.append(await ask(harness, turn("two"), key="mine-0123456789", thread=go_on(first)))

    assert second["status"] == 200
    assert [(answer["status"], answer["error"]["type"]) for answer in found] == [(404, "not_found_error")] * 5
    assert [answer["error"]["details"] for answer in found] == [{"error_code": "thread_not_found"}] * 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thread": {"type": "create", "previous_message_id": "msg_1"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}, "system": "x"}, "system"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}, "tools": [TOOL]}, "tools"),
        ({"thread": {"type": "create"}, "messages": [turn("x"), said()]}, "thread"),
        ({"thread": {"type": "create"}, "max_tokens": 0}, "thread"),
        ({"thread": "create"}, "thread"),
        ({"thread": {"type": "fork"}}, "thread.type"),
    ],
)
async def test_what_does_not_go_with_a_thread_is_refused(fields: dict[str, Any], param: str) -> None:
    """By its name, before anything is computed."""
    async with running_gateway(says(TEXT)) as harness:
        answer = await harness.client.post("/v1/messages", json={"max_tokens": 5, "messages": [turn("x")], **fields})
        submitted = len(harness.cell.submitted)

    assert (answer.status_code, answer.json()["error"]["param"], submitted) == (400, param, 0)


async def test_a_gateway_that_keeps_nothing_says_so() -> None:
    """In the words by which a client goes on without a thread."""
    async with (
        running_gateway(says(TEXT), over_http=True, keep_responses=False) as harness,
        anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client,
    ):
        thread = client.beta.messages.thread(
            model="test-model", max_tokens=50, unsupported_request_behavior="continue_unthreaded"
        )
        answers = [await thread.send({"role": "user", "content": text}) for text in ("one", "two")]

    assert [answer.stop_reason for answer in answers] == ["end_turn"] * 2


async def test_an_answer_ends_where_the_turn_before_cannot_be_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an answer all the same, and goes on."""

    async def fails(names: str, *, timeout_s: float = 2.0) -> int:
        raise Unavailable("the broker is away")

    async with running_gateway(says(TEXT)) as harness:
        first = await ask(harness, turn("one"), thread={"type": "create"})
        monkeypatch.setattr(harness.bus, "forget", fails)
        second = await ask(harness, turn("two"), thread=go_on(first))
        third = await ask(harness, turn("three"), thread=go_on(second))

    assert [answer["status"] for answer in (first, second, third)] == [200] * 3


def test_reasoning_that_the_client_does_not_see_is_kept() -> None:
    """The next turn's prompt needs it."""
    made = generation()
    view = MessagesView(made, "msg-1", "m", max_tokens=64, hides_thinking=True)
    hear(made.choices[0], "rRtT", "stop")

    assert [getattr(block, "thinking", "") for block in view.reply()] == ["let me think", ""]
    assert b"let me think" not in view.whole()


async def test_calls_of_tools_go_on_as_well() -> None:
    """With the names, ids and objects that the client would send back, which the next turn's results belong to."""
    broker = MemoryBroker()
    bus = broker.connect("gateway")
    await bus.ensure_streams(StreamLimits())
    kept = KeptThreads(KeptEntries(bus), here)
    asked = msgspec.convert({"max_tokens": 5, "messages": [turn("x")], "tools": [TOOL]}, MessagesRequest)
    answer_id = new_message_id("")
    blocks: list[OutputBlock] = [
        ThinkingBlock(thinking="hm", signature="s"),
        TextBlock(text="I look."),
        ToolUseBlock(id="call_1", name="weather", input={"city": ["Oslo", None]}),
    ]
    await kept.keep(account(), answer_id, asked, blocks, previous=None)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]}
    thread = MessageThread(type="continue", previous_message_id=answer_id)
    again = msgspec.convert({"max_tokens": 5, "messages": [result]}, MessagesRequest)
    whole, _ = await kept.whole(account(), again, thread)

    sent_back = {"role": "assistant", "content": msgspec.to_builtins(blocks)}
    body = {"max_tokens": 5, "messages": [turn("x"), sent_back, result], "tools": [TOOL]}
    expected = chat_request(msgspec.convert(body, MessagesRequest), ())
    told = chat_request(whole, ())
    assert [told.tools, told.messages[1:]] == [expected.tools, expected.messages[1:]]


async def test_a_thread_that_cannot_be_read_says_so() -> None:
    """It is no thread that was not kept."""
    bus = MemoryBroker().connect("gateway")
    await bus.ensure_streams(StreamLimits())
    entries, answer_id = KeptEntries(bus), new_message_id("")
    await entries.keep(account(), None, answer_id, b"{")
    thread = MessageThread(type="continue", previous_message_id=answer_id)
    asked = msgspec.convert({"max_tokens": 5, "messages": [turn("x")]}, MessagesRequest)

    with pytest.raises(TransportError, match="cannot be read"):
        await KeptThreads(entries, here).whole(account(), asked, thread)
