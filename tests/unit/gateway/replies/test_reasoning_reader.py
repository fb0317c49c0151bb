"""Reasoning is told from the answer behind it, whole or in pieces, and its tokens are counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.formats import BRACKETED, THINK, reasoning_fault, reasoning_syntax
from services.gateway.replies.parts import PlainReader, Reasoning, ReplyPart, Text
from services.gateway.replies.reasoning_reader import ReasoningCount, ReasoningReader
from tests.unit.gateway.replies.spoken import a_call, every_split, read, tool_reader

SAID: list[tuple[bool, str, list[ReplyPart]]] = [
    (False, "<think>\nhm\n</think>\n\nYes", [Reasoning("hm"), Text("Yes")]),
    (False, " \n<think>hm</think>Yes", [Reasoning("hm"), Text("Yes")]),
    (False, "<think>\n\n\nhm\n\n\n</think>\n\n\nYes", [Reasoning("\n\nhm\n\n"), Text("\nYes")]),
    (False, "<think>\n\n</think>\n\nYes", [Text("Yes")]),
    (False, "<think>a</think", [Reasoning("a</think")]),
    (False, "<think>a\n", [Reasoning("a\n")]),
    (False, "Yes <think>hm</think>", [Text("Yes <think>hm</think>")]),
    (False, "<thin", [Text("<thin")]),
    (False, "", []),
    (True, "hm\n</think>\n\nYes", [Reasoning("hm"), Text("Yes")]),
    (True, "\nhm</think>Yes</think>", [Reasoning("hm"), Text("Yes</think>")]),
    (True, "<think>hm</think>Yes", [Reasoning("hm"), Text("Yes")]),
    (True, "no end", [Reasoning("no end")]),
    (True, "</think>Yes", [Text("Yes")]),
]


@pytest.mark.parametrize(("begins_inside", "text", "parts"), SAID)
def test_reasoning_ends_at_its_marker(begins_inside: bool, text: str, parts: list[ReplyPart]) -> None:
    """The line breaks that templates write at its edges are no part of it."""
    assert every_split(lambda: ReasoningReader(THINK, PlainReader(), begins_inside=begins_inside), text) == parts


def test_calls_behind_reasoning_are_read_and_those_within_are_none() -> None:
    """A model may think about a call before it makes one."""
    said = '<tool_call>{"name": "look"}</tool_call>\n</think>\n\n<tool_call>{"name": "look"}</tool_call>'

    assert every_split(lambda: ReasoningReader(THINK, tool_reader("hermes"), begins_inside=True), said) == [
        Reasoning('<tool_call>{"name": "look"}</tool_call>'),
        *a_call(0, "look", "{}"),
    ]


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "\n", "a", " ", "</"]), max_size=12)


@given(pieces=PIECES, begins_inside=st.booleans())
def test_any_text_reads_the_same_however_it_is_cut(pieces: list[str], begins_inside: bool) -> None:
    """Character by character as at once, and by the pieces."""

    def make() -> ReasoningReader:
        return ReasoningReader(THINK, PlainReader(), begins_inside=begins_inside)

    text = "".join(pieces)

    assert read(make(), pieces) == read(make(), [text]) == read(make(), text)


@given(pieces=PIECES, begins_inside=st.booleans(), cut=st.integers(0, 12))
def test_the_count_does_not_depend_on_how_tokens_come(pieces: list[str], begins_inside: bool, cut: int) -> None:
    """Pieces are tokens here; there is reasoning exactly where some token of it is counted."""
    counts = [ReasoningCount(THINK, lambda token: pieces[token].encode(), begins_inside=begins_inside) for _ in "ab"]
    tokens = range(len(pieces))
    counts[0].feed(tokens)
    counts[1].feed(tokens[:cut])
    counts[1].feed(tokens[cut:])
    parts = read(ReasoningReader(THINK, PlainReader(), begins_inside=begins_inside), pieces)

    assert counts[0].tokens == counts[1].tokens
    if any(isinstance(part, Reasoning) and "a" in part.text for part in parts):
        assert counts[0].tokens > 0


@pytest.mark.parametrize(
    ("begins_inside", "tokens", "count"),
    [
        (False, ["<think>", "\n", "a", "b", "</think>", "c", "d"], 3),
        (True, ["a", "b", "</think>", "c"], 2),
        (True, ["<think>", "a", "</think>", "c"], 1),
        (False, ["a", "<think>", "b", "</think>"], 0),
        (True, ["</think>", "a"], 0),
        (True, ["a", "b"], 2),
        (False, ["<", "think", ">", "a", "</think>"], 1),
    ],
)
def test_tokens_between_the_markers_are_counted(begins_inside: bool, tokens: list[str], count: int) -> None:
    """The markers themselves are not."""
    counted = ReasoningCount(THINK, lambda token: tokens[token].encode(), begins_inside=begins_inside)
    counted.feed(range(len(tokens)))

    assert counted.tokens == count


def test_the_end_of_a_prompt_says_whether_it_opened_reasoning() -> None:
    """Blanks behind the marker do not matter; a closed pair is closed."""
    always = reasoning_syntax("deepseek_r1", "")

    assert THINK.is_open_behind("<|assistant|><think>\n")
    assert not THINK.is_open_behind("<|assistant|><think>\n\n</think>\n\n")
    assert not THINK.is_open_behind("<|assistant|>")
    assert always is not None
    assert always.is_open_behind("<|assistant|>")
    assert not always.is_open_behind("</think>\n\n")


def test_markers_are_chosen_from_the_template_or_by_name() -> None:
    """A pair of one's own has a comma between them."""
    assert reasoning_syntax("auto", "{{ '<think>' }} {{ '</think>' }}") is THINK
    assert reasoning_syntax("auto", "[THINK] [/THINK]") is BRACKETED
    assert reasoning_syntax("auto", "{{ messages }}") is None
    assert reasoning_syntax("none", "</think>") is None
    found = reasoning_syntax("<r>,</r>", "")
    assert found is not None
    assert (found.opener, found.closer) == ("<r>", "</r>")
    assert not reasoning_fault("<r>,</r>")
    assert "must be one of" in reasoning_fault("thinking")
    assert "must be one of" in reasoning_fault("a,")
