"""Which message, or which other part of a prompt, a token lies in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.prompt_places import Place, place_of
from tests.unit.gateway.running_gateway import tokenizer

TOOLS = [{"type": "function", "function": {"name": name, "description": f"Get the {name}."}} for name in ("one", "two")]


def request(messages: list[tuple[str, Any]], **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}
    return msgspec.convert(body, ChatRequest)


def place(asked: ChatRequest, text: str, word: str, after: str = "") -> Place:
    """Of the token that begins with ``word``, in a prompt of this text."""
    ids = tokenizer()
    at = text.index(word, text.index(after))
    tokens = ids.encode_now(text, add_special_tokens=False)
    position = next(number for number in range(len(tokens)) if len(ids.decode(tokens[: number + 1])) > at)
    return place_of(asked, tokens, position, ids.decode)


def rendered(asked: ChatRequest) -> str:
    messages = [{"role": each.role, "content": each.content} for each in asked.messages]
    return tokenizer().render(messages)


def test_a_token_lies_in_a_message() -> None:
    """The contents may repeat one another, be empty, or have several bytes a character."""
    asked = request([("system", "Be brief."), ("user", "Grüße, 世界 🌍"), ("assistant", ""), ("user", "Be brief.")])
    text = rendered(asked)

    assert place(asked, text, "brief") == Place("message", 0, "system")
    assert place(asked, text, "Be") == Place("message", 0, "system")
    assert place(asked, text, "世界") == Place("message", 1, "user")
    assert place(asked, text, "brief", after="🌍") == Place("message", 3, "user", is_first=False)
    assert place(asked, text, "<|user|>") == Place("template", 1, "user")
    end = tokenizer().encode_now(text, add_special_tokens=False)
    assert place_of(asked, end, len(end) - 1, tokenizer().decode) == Place("generation_prompt")


def test_a_template_adds_words_and_leaves_some_out() -> None:
    """Its own words belong to the message behind them; a content that it has trimmed or dropped disturbs no other."""
    asked = request([("system", "  Be brief.\n"), ("assistant", "<think>hm</think>yes"), ("user", "and now?")])
    text = (
        "<s><|system|>Today Date: 24 Nov\n\nBe brief.<|end|><|assistant|>yes<|end|><|user|>and now?<|end|><|assistant|>"
    )

    assert place(asked, text, "24") == Place("template", 0, "system")
    assert place(asked, text, "Be") == Place("message", 0, "system")
    assert place(asked, text, "now") == Place("message", 2, "user")
    assert place(asked, text, "<|user|>").message == 2


@pytest.mark.parametrize("where", ["inside", "behind"])
def test_a_token_lies_among_the_tools(where: str) -> None:
    """Wherever the template lists them; what names a tool in a message does not."""
    asked = request([("system", "Be brief."), ("user", 'Call {"name": "one"} now.')], tools=TOOLS)
    listed = " ".join(msgspec.json.encode(tool).decode() for tool in TOOLS)
    system = f"Be brief.\n# Tools\n{listed}" if where == "inside" else f"Be brief.<|end|><|system|>{listed}"
    text = f'<s><|system|>{system}<|end|><|user|>Call {{"name": "one"}} now.<|end|><|assistant|>'

    assert place(asked, text, "two") == Place("tools", tools=("one", "two"))
    assert place(asked, text, "brief").part == "message"
    assert place(asked, text, "one", after="Call").part == "message"


def test_content_in_parts_is_one_text() -> None:
    """As templates get it."""
    asked = request([("user", [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}])])
    text = "<s><|user|>first\nsecond<|end|><|assistant|>"

    assert place(asked, text, "second") == Place("message", 0, "user")
