"""How much text a prompt is counted as."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from services.gateway.openai_schema.leases import CacheControl
from services.gateway.prompt_weight import INLINE_CHARACTERS, LONG_CHARACTERS, characters, weight


def user(content: Any, **more: Any) -> ChatMessage:
    return ChatMessage(role="user", content=content, **more)


@pytest.mark.parametrize(
    ("rendered", "count"),
    [
        ("abc", 3),
        (None, 0),
        ([{"role": "user", "content": "hello"}], len("roleusercontenthello")),
        ([{"function": {"arguments": {"a": ["bc", {"d": "ef"}], "n": 12345}}}], len("functionargumentsabcdefn")),
    ],
)
def test_all_text_that_a_template_sees_is_counted(rendered: object, count: int) -> None:
    """Names of fields, too, and however deep; numbers are as good as nothing."""
    assert characters(rendered) == count
    assert characters(rendered, rendered) == 2 * count


def test_nesting_as_deep_as_json_allows_is_counted() -> None:
    """Without recursion."""
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]

    assert characters(deep) == 1


@pytest.mark.parametrize(
    ("request_", "is_long"),
    [
        (ChatRequest(messages=[user("hi")]), False),
        (ChatRequest(messages=[user("h" * INLINE_CHARACTERS)]), True),
        (ChatRequest(messages=[user([ContentPart(type="text", text="h" * INLINE_CHARACTERS)])]), True),
        (ChatRequest(messages=[user("")] * 100), True),
        (ChatRequest(messages=[user("hi", tool_calls=[{}])]), True),
        (ChatRequest(messages=[user("hi", reasoning_content="h" * INLINE_CHARACTERS)]), True),
        (ChatRequest(messages=[user("hi", reasoning="h" * INLINE_CHARACTERS)]), True),
        (ChatRequest(messages=[user("hi", refusal="h" * INLINE_CHARACTERS)]), True),
        (ChatRequest(messages=[user("hi")], tools=[{}]), True),
        (ChatRequest(messages=[user("hi")], chat_template_kwargs={"a": 1}), True),
    ],
)
def test_what_may_take_long_is_no_small_conversation(request_: ChatRequest, is_long: bool) -> None:
    """Whatever is not plain and short content is rendered in a thread."""
    assert (weight(request_) > INLINE_CHARACTERS) == is_long


LARGE = "x" * (LONG_CHARACTERS + 1)
CALL = {"type": "function", "function": {"name": "f", "arguments": LARGE}}


@pytest.mark.parametrize(
    "request_",
    [
        ChatRequest(messages=[user("hi")], tools=[{"type": "function", "function": {"description": LARGE}}]),
        ChatRequest(messages=[user("hi")], tools=[{str(number): number for number in range(LONG_CHARACTERS // 20)}]),
        ChatRequest(messages=[user("hi")], chat_template_kwargs={"a": [LARGE]}),
        ChatRequest(messages=[user("hi")], reasoning_effort=LARGE),
        ChatRequest(messages=[user(None, tool_calls=[CALL])]),
        ChatRequest(messages=[user([ContentPart(type="refusal", refusal=LARGE)])]),
        ChatRequest(messages=[user("hi", name=LARGE)]),
        ChatRequest(messages=[user([ContentPart(type="text", text="")] * 2_001)]),
    ],
)
def test_all_that_is_rendered_can_make_a_conversation_a_long_one(request_: ChatRequest) -> None:
    """Wherever a client puts it, long text waits for other long ones alone."""
    assert weight(request_) > LONG_CHARACTERS


def test_a_conversation_weighs_once_more_for_each_breakpoint() -> None:
    """It is rendered again to find where that stands."""
    plain = ChatRequest(messages=[user("a" * 500)] * 4)
    marked = ChatRequest(messages=[user("a" * 500, cache_control=CacheControl(type="ephemeral"))] * 4)

    assert weight(marked) == 5 * weight(plain)


class _Watched(list[Any]):
    """Counts how many of its elements were looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.seen += 1
            yield each


def test_what_is_weighed_is_bounded() -> None:
    """The event loop weighs a conversation, so it does not look through all of a large one."""
    parts, values = _Watched([ContentPart(type="text", text="")] * 100_000), _Watched([1] * 1_000_000)

    weight(ChatRequest(messages=[user(parts)]))
    weight(ChatRequest(messages=[user("hi")], tools=[{"parameters": values}]))

    assert parts.seen < 2_100
    assert values.seen < 4_100
