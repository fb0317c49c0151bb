"""How much text a prompt is counted as."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.openai_schema.chat import ChatMessage, ChatRequest, ContentPart
from services.gateway.prompt_weight import INLINE_CHARACTERS, characters, weight


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
