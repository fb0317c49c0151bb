"""Heads of prompts: what shares digests, and what does not."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.prompt_heads import FIRST_DEPTH_BYTES, Asked, asked_of, next_depth
from services.gateway.responses.ids import cell_of, new_response_id, suffix_of

LONG = "the same words again " * 100


def head_of(**body: Any) -> Asked:
    return asked_of(json.dumps(body).encode())


def chat(*texts: str, **extra: Any) -> Asked:
    return head_of(messages=[{"role": "user", "content": text} for text in texts], **extra)


def shared(one: Asked, other: Asked) -> int:
    """Bytes to which two heads agree."""
    pairs = zip(one.head.digests, other.head.digests, one.head.depths, strict=False)
    return max((depth for mine, theirs, depth in pairs if mine == theirs), default=0)


def test_a_conversation_shares_what_was_said_before() -> None:
    """The next turn has all digests of the turn before."""
    first, second = chat(LONG), chat(LONG, "an answer", "and a question")

    assert first.head.digests
    assert second.head.digests[: len(first.head.digests)] == first.head.digests


def test_other_text_shares_only_what_is_equal() -> None:
    """Digests agree up to the last depth above the first difference, and nowhere below."""
    one, other = chat(LONG + "x" + LONG), chat(LONG + "y" + LONG)
    at = len(LONG)

    assert at - 2 * FIRST_DEPTH_BYTES < shared(one, other) <= at + 100
    assert one.head.digests[-1] != other.head.digests[-1]


def test_what_keeps_kv_apart_keeps_heads_apart() -> None:
    """Another model, salt or set of tools shares nothing."""
    plain = chat(LONG, model="m")

    assert shared(plain, chat(LONG, model="m")) > 0
    assert shared(plain, chat(LONG, model="n")) == 0
    assert shared(plain, chat(LONG, model="m", cache_salt="s")) == 0
    assert shared(plain, chat(LONG, model="m", tools=[{"type": "function"}])) == 0


def test_spaces_and_order_in_json_do_not_matter() -> None:
    """The text counts, not how the body writes it."""
    one = chat(LONG, model="m")
    other = asked_of(json.dumps({"model": "m", "messages": [{"content": LONG, "role": "user"}]}, indent=3).encode())
    parts = head_of(model="m", messages=[{"role": "user", "content": [{"type": "text", "text": LONG}]}])

    assert one.head == other.head == parts.head


def test_spaces_within_tools_and_their_calls_do_not_matter() -> None:
    """Nor how characters are escaped; the order of keys does, because templates write it."""
    function = {"name": "sök", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    body = {
        "model": "m",
        "messages": [{"role": "assistant", "content": LONG, "tool_calls": tools}, {"role": "user", "content": LONG}],
        "tools": tools,
    }
    one = asked_of(json.dumps(body).encode())
    others = [
        asked_of(json.dumps(body, indent=2).encode()),
        asked_of(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()),
    ]
    turned = [{"function": function, "type": "function"}]
    reordered = asked_of(json.dumps(body | {"tools": turned}).encode())

    assert one.head.digests
    assert [other.head for other in others] == [one.head, one.head]
    assert shared(one, reordered) == 0


def test_tools_that_are_none_are_none() -> None:
    """Null and an empty list are as good as no field; what no text can be made of has a head all the same."""
    plain = chat(LONG, model="m")
    odd = b'{"model": "m", "tools": ["\\ud800\\ud800"], "messages": [{"role": "user", "content": "x"}]}'

    assert chat(LONG, model="m", tools=None).head == chat(LONG, model="m", tools=[]).head == plain.head
    assert asked_of(odd).head.nbytes >= 0


def test_a_body_without_a_model_is_known_under_the_default() -> None:
    """As one that names it: the cell answers both from one cache. What a router reads in the body stays as it is."""
    body = json.dumps({"messages": [{"role": "user", "content": LONG}]}).encode()
    named, unnamed = chat(LONG, model="m"), asked_of(body, default_model="m")

    assert named.head == unnamed.head
    assert (unnamed.model, chat(LONG).head == named.head) == ("", False)
    assert (
        asked_of(json.dumps({"model": "n", "prompt": LONG}).encode(), "m").head == head_of(model="n", prompt=LONG).head
    )


def test_a_completion_has_a_head_by_its_text_or_its_tokens() -> None:
    """A string, a list of strings, token ids, and lists of those."""
    text, listed = head_of(prompt=LONG), head_of(prompt=[LONG, "other"])
    tokens, nested = head_of(prompt=list(range(500))), head_of(prompt=[list(range(500))])

    assert text.head == listed.head
    assert tokens.head == nested.head
    assert len(tokens.head.digests) > 0


def test_a_body_says_what_a_router_asks_of_it() -> None:
    """Model, conversation, and whether it streams; wrong types say nothing."""
    asked = chat("x", model="m", prompt_cache_key="k", stream=True)
    wrong = chat("x", model=3, prompt_cache_key=["k"], stream="yes")

    assert (asked.model, asked.session, asked.is_stream) == ("m", "k", True)
    assert (wrong.model, wrong.session, wrong.is_stream) == ("", "", False)


@given(st.binary(max_size=400))
def test_no_body_raises(body: bytes) -> None:
    """Whatever the bytes are, there is an answer."""
    assert asked_of(body).head.nbytes >= 0


@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=3000))
def test_heads_of_a_common_start_agree(start: str, one: str, other: str) -> None:
    """No digest above the end of the common start differs."""
    first, second = chat(start + one), chat(start + other)
    common = len(start.encode("utf-8", "surrogatepass"))

    for place, depth in enumerate(first.head.depths):
        if depth <= common:
            assert first.head.digests[place] == second.head.digests[place]


def test_depths_grow_by_a_sixteenth() -> None:
    """So a prompt of half a mebibyte has few heads, and none is far behind the end of what is shared."""
    depths = [FIRST_DEPTH_BYTES]
    while depths[-1] < 2**19:
        depths.append(next_depth(depths[-1]))

    assert len(depths) < 160
    assert all(after - before <= max(FIRST_DEPTH_BYTES, before / 16) for before, after in pairwise(depths))


def test_all_apis_share_heads_where_they_share_a_prompt() -> None:
    """System prompt, instructions and turns are known under each API's names."""
    said = [{"role": "user", "content": LONG}]
    chats = head_of(messages=[{"role": "system", "content": LONG}, *said])
    messages = head_of(system=LONG, messages=said)
    blocks = head_of(system=[{"type": "text", "text": LONG}], messages=said)
    responses = head_of(instructions=LONG, input=LONG)
    items = head_of(instructions=LONG, input=[{"role": "user", "content": [{"type": "input_text", "text": LONG}]}])

    assert chats.head.digests
    assert messages.head == blocks.head == responses.head == items.head == chats.head


def test_what_tools_said_is_part_of_the_head() -> None:
    """Two conversations that differ in it part there."""
    asked = {"role": "user", "content": LONG}

    def result(text: str) -> Asked:
        return head_of(messages=[asked, {"role": "user", "content": [{"type": "tool_result", "content": text}]}])

    def output(text: str) -> Asked:
        return head_of(input=[asked, {"type": "function_call_output", "call_id": "c", "output": text}])

    assert 0 < shared(result("x" + LONG), result("y" + LONG)) <= len(LONG) + 100
    assert 0 < shared(output("x" + LONG), output("y" + LONG)) <= len(LONG) + 100


def test_a_body_without_what_was_said_before_has_no_head() -> None:
    """It says which response it goes on from instead."""
    asked = head_of(input=LONG, previous_response_id="resp_1")

    assert (asked.head.digests, asked.previous) == ((), "resp_1")


def test_a_thread_that_is_continued_has_no_head() -> None:
    """One that is created has that of its conversation."""
    messages = [{"role": "user", "content": LONG}]
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    asked, plain = head_of(messages=messages, thread=thread), head_of(messages=messages)

    assert (asked.head.digests, asked.previous) == ((), "msg_1")
    assert head_of(messages=messages, thread={"type": "create"}) == plain


def test_a_request_that_refers_to_an_item_goes_where_its_response_is_kept() -> None:
    """The last reference tells: its response has all items before it."""
    response_id = new_response_id("lisbon")
    items = [
        {"role": "user", "content": "hi"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "item_reference", "id": f"fc_{suffix_of(response_id)}12"},
        {"role": "user", "content": "go on"},
    ]

    asked = asked_of(json.dumps({"model": "m", "input": items}).encode())

    assert (asked.previous, cell_of(asked.previous, ["porto", "lisbon"])) == (response_id, "lisbon")
