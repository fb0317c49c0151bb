"""A choice's reply is read as its deltas come, long ones too."""

from __future__ import annotations

from services.gateway.assembly import Delta
from services.gateway.replies.formats import THINK
from services.gateway.replies.parts import CallBegun, PlainReader, Text
from services.gateway.replies.reading import PIECE_CHARACTERS, Reply
from services.gateway.replies.reasoning_reader import ReasoningCount, ReasoningReader
from tests.unit.gateway.replies.spoken import a_call, joined, tool_reader


def test_without_a_reader_all_is_text() -> None:
    """And nothing is counted as reasoning."""
    reply = Reply()

    assert reply.read(Delta(text="<think>a")) == [Text("<think>a")]
    assert reply.read(Delta(finish="stop")) == []
    assert (reply.finish_reason("stop"), reply.finish_reason(None), reply.reasoning_tokens) == ("stop", None, None)


def test_a_long_delta_is_read_in_pieces_without_a_difference() -> None:
    """Calls in a long answer cost what they cost in a stream."""
    arguments = f'{{"text": "{"x" * (3 * PIECE_CHARACTERS)}"}}'
    reply = Reply(tool_reader("hermes"))
    parts = reply.read(
        Delta(text=f'Look.\n<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', finish="stop")
    )

    assert joined(parts) == [Text("Look."), *a_call(0, "f", arguments)]
    assert reply.finish_reason("stop") == "tool_calls"


def test_what_is_withheld_comes_with_the_end() -> None:
    """Whatever ended the answer."""
    reply = Reply(tool_reader("hermes"))
    said = reply.read(Delta(text="a <tool_c"))
    rest = reply.read(Delta(finish="length"))

    assert (said, rest) == ([Text("a ")], [Text("<tool_c")])
    assert reply.finish_reason("length") == "length"


def test_a_call_in_any_delta_makes_the_reason() -> None:
    """But for a named function, which ends with stop."""
    call = '<tool_call>{"name": "f"}</tool_call>'
    free, named = Reply(tool_reader("hermes")), Reply(tool_reader("hermes"), is_named=True)
    begun = [part for reply in (free, named) for part in reply.read(Delta(text=call))]
    for reply in (free, named):
        reply.read(Delta(finish="stop"))

    assert sum(isinstance(part, CallBegun) for part in begun) == 2
    assert (free.finish_reason("stop"), named.finish_reason("stop")) == ("tool_calls", "stop")


def test_reasoning_is_counted_by_tokens() -> None:
    """As they come with the deltas."""
    texts = ["<think>", "hm", " so", "</think>", "Yes"]
    count = ReasoningCount(THINK, lambda token: texts[token].encode(), begins_inside=False)
    reply = Reply(ReasoningReader(THINK, PlainReader(), begins_inside=False), count)
    reply.read(Delta(text="<think>hm", tokens=[0, 1]))
    before = reply.reasoning_tokens
    reply.read(Delta(text=" so</think>Yes", tokens=[2, 3, 4]))

    assert (before, reply.reasoning_tokens) == (1, 2)
