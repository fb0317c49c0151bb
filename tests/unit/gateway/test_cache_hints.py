"""What callers say about caching becomes leases that end where they say."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import conversation
from services.gateway.cache_hints import (
    breakpoints,
    chat_leases,
    common_length,
    returns_in_ms,
    session_lease,
    without_controls,
)
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.completions import CompletionRequest
from shared.errors import InvalidRequest
from shared.messages.requests import Lease
from tests.unit.gateway.running_gateway import tokenizer

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def request(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    """A chat request as it comes out of a body."""
    return msgspec.convert({"messages": messages, **fields}, ChatRequest)


def part(text: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    """A text part, with a breakpoint or without."""
    return {"type": "text", "text": text, "cache_control": control}


def leases_of(asked: ChatRequest) -> tuple[list[int], tuple[Lease, ...]]:
    """The prompt's tokens and its leases."""
    messages = conversation.template_messages(asked.messages)
    tokens = tokenizer().encode_chat(messages)
    render = partial(tokenizer().render, add_generation_prompt=True)
    return tokens, chat_leases(breakpoints(asked), tokens, messages, None, render, tokenizer())


def test_a_breakpoint_covers_the_prompt_to_the_end_of_its_text() -> None:
    """What it covers reads as the prompt up to there, and what follows begins behind it."""
    asked = request(
        [
            {"role": "system", "content": [part("You are terse.", HOUR)]},
            {"role": "user", "content": [part("A long document."), part("A second one.", EPHEMERAL), part("Why?")]},
        ]
    )

    tokens, (system, document) = leases_of(asked)

    assert tokenizer().decode(tokens[: system.tokens]).endswith("You are terse.")
    assert tokenizer().decode(tokens[: document.tokens]).endswith("A long document.\nA second one.")
    assert (system.ttl_ms, document.ttl_ms) == (3_600_000, 300_000)


def test_the_next_turn_has_the_same_leased_prefix() -> None:
    """Where a conversation goes on, a breakpoint of before ends at the same token."""
    first: list[dict[str, Any]] = [
        {"role": "system", "content": [part("Rules.", HOUR)]},
        {"role": "user", "content": "Hello"},
    ]
    more: list[dict[str, Any]] = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And now?"}]

    before, (lease,) = leases_of(request(first))
    after, (same,) = leases_of(request(first + more))

    assert same.tokens == lease.tokens > 0
    assert before[: lease.tokens] == after[: lease.tokens]


def test_a_message_of_one_text_may_have_a_breakpoint_itself() -> None:
    """Some clients put it beside the content."""
    asked = request([{"role": "user", "content": "A document.", "cache_control": EPHEMERAL}])

    tokens, (lease,) = leases_of(asked)

    assert tokenizer().decode(tokens[: lease.tokens]).endswith("A document.")


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Co"]), max_size=20), min_size=1, max_size=6
    )
)
def test_tokens_of_a_lease_are_a_prefix_of_what_the_text_before_it_has(texts: list[str]) -> None:
    """Wherever texts end, within a token or not, leases begin the prompt and none claims more than it has."""
    asked = request([{"role": "user", "content": [part(text, EPHEMERAL if place < 4 else None)]}
                     for place, text in enumerate(texts)])  # fmt: skip

    tokens, leases = leases_of(asked)

    counts = [lease.tokens for lease in leases]
    assert counts == sorted(counts)
    assert all(0 <= count <= len(tokens) for count in counts)


class Letters:
    """A tokenizer whose tokens are letters, but that takes ``ab`` together."""

    def encode_rendered(self, text: str) -> list[int]:
        """One number for each letter, and one for the pair."""
        return [1 if piece == "\0" else ord(piece) for piece in text.replace("ab", "\0")]

    def decode(self, tokens: Sequence[int]) -> str:
        """The letters again."""
        return "".join("ab" if token == 1 else chr(token) for token in tokens)


def plain(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """A template without any words of its own: tools, then messages."""
    return "".join(f"<{tool['function']['name']}>" for tool in tools or ()) + "".join(m["content"] for m in messages)


def test_a_token_that_spans_a_breakpoint_is_not_covered() -> None:
    """The prompt has ``ab`` where the first message's text alone would have ``a``; the next breakpoint is right."""
    messages = [{"role": "user", "content": "xa"}, {"role": "user", "content": "by"}, {"role": "user", "content": "z"}]
    asked = request([{**message, "cache_control": EPHEMERAL} for message in messages[:2]])
    tokens = Letters().encode_rendered("xabyz")

    leases = chat_leases(breakpoints(asked), tokens, messages, None, plain, Letters())

    assert [lease.tokens for lease in leases] == [1, 3]


def test_an_answer_s_own_tokens_do_not_end_what_is_kept() -> None:
    """Where the prompt has ``a`` and ``b`` for what the tokenizer takes together, breakpoints behind it are right."""
    messages = [{"role": "user", "content": "xab"}, {"role": "user", "content": "yz"}, {"role": "user", "content": "w"}]
    asked = request([messages[0], {**messages[1], "cache_control": EPHEMERAL}, messages[2]])
    tokens = [ord(letter) for letter in "xabyzw"]

    (lease,) = chat_leases(breakpoints(asked), tokens, messages, None, plain, Letters())

    assert lease.tokens == 5


def test_a_breakpoint_of_a_tool_covers_the_tools_up_to_it() -> None:
    """And what the template puts before them; the model is not shown the breakpoint."""
    tools = [{"type": "function", "function": {"name": name}} for name in "pqr"]
    marked = [{**tool, "cache_control": HOUR} if place != 1 else tool for place, tool in enumerate(tools)]
    asked = request([{"role": "user", "content": "Hi"}], tools=marked)
    shown = without_controls(asked.tools)
    tokens = Letters().encode_rendered("<p><q><r>Hi")

    leases = chat_leases(breakpoints(asked), tokens, [{"role": "user", "content": "Hi"}], shown, plain, Letters())

    assert shown == tools
    assert [lease.tokens for lease in leases] == [4, 9]  # The next tool begins alike.


def test_a_text_that_the_template_leaves_out_keeps_nothing() -> None:
    """Its lease has no tokens, which the cell refuses, and says so."""
    asked = request([{"role": "user", "content": "Hi", "cache_control": EPHEMERAL}])

    def silent(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "always the same"

    (lease,) = chat_leases(breakpoints(asked), [1], [{"role": "user", "content": "Hi"}], None, silent, Letters())

    assert lease.tokens == 0


def test_more_breakpoints_than_four_are_refused() -> None:
    """Tools, texts and messages count together."""
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": EPHEMERAL}
    message = {"role": "user", "content": [part("a", EPHEMERAL), part("b", EPHEMERAL)]}

    assert len(breakpoints(request([message], tools=[tool, tool]))) == 4
    with pytest.raises(InvalidRequest, match="5 breakpoints"):
        breakpoints(request([message], tools=[tool, tool, tool]))


@pytest.mark.parametrize("control", [{"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"}, "yes"])
def test_a_breakpoint_that_nobody_knows_is_refused(control: object) -> None:
    """In a tool, which is free text otherwise, as in a message."""
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": control}

    with pytest.raises(InvalidRequest, match="cache_control"):
        breakpoints(request([{"role": "user", "content": "Hi"}], tools=[tool]))
    with pytest.raises(msgspec.ValidationError):
        request([{"role": "user", "content": "Hi", "cache_control": control}])


@pytest.mark.parametrize(
    ("fields", "leases"),
    [
        ({}, ()),
        ({"prompt_cache_key": "k"}, (Lease(tokens=9, ttl_ms=300_000, key="k", with_answer=True),)),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
         (Lease(tokens=9, ttl_ms=86_400_000, key="k", with_answer=True),)),
        ({"prompt_cache_retention": "in-memory"}, (Lease(tokens=9, ttl_ms=300_000, with_answer=True),)),
    ],
)  # fmt: skip
def test_a_key_or_a_retention_leases_the_whole_prompt(fields: dict[str, str], leases: tuple[Lease, ...]) -> None:
    """For five minutes unless it says a day."""
    asked = msgspec.convert({"prompt": "text", **fields}, CompletionRequest)

    assert session_lease(asked, 9) == leases


def test_prompts_of_one_request_are_sessions_of_their_own() -> None:
    """So that none takes the place of another."""
    asked = msgspec.convert({"prompt": ["a", "b"], "prompt_cache_key": "k"}, CompletionRequest)

    assert [session_lease(asked, 9, place)[0].key for place in (0, 1)] == ["k", "k#1"]


def test_a_hint_of_a_return_comes_along() -> None:
    """In milliseconds; 0 says nothing."""
    asked = msgspec.convert({"prompt": "a", "cache": {"returns_in_s": 1.5}}, CompletionRequest)
    silent = msgspec.convert({"prompt": "a"}, CompletionRequest)

    assert (returns_in_ms(asked), returns_in_ms(silent)) == (1500, 0)


@given(st.text("ab"), st.text("ab"), st.text("ab"))
def test_common_length_is_how_much_is_equal(start: str, one: str, other: str) -> None:
    """As counted letter by letter."""
    one, other = start + one, start + other
    expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    assert common_length(one, other) == expected
