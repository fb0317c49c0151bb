"""Tool calls are found in a model's text, whole or in pieces; what is none stays text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.replies.parts import CallArguments, CallBegun, ReplyPart, Text
from tests.unit.gateway.replies.spoken import a_call, every_split, read, tool_reader

LOOK = '{"name": "look", "arguments": {"at": "the \\"{sea}\\"", "n": [1, {}]}}'
AT = '{"at": "the \\"{sea}\\"", "n": [1, {}]}'
ADD = '{"name": "add.up", "arguments": {}}'

BOTH = [*a_call(0, "look", AT), *a_call(1, "add.up", "{}")]

TAGGED = (
    '<tool_call>\n<function=look>\n<parameter=at>\nthe "{sea}"\n</parameter>\n<parameter=n>\n7\n</parameter>\n'
    "</function>\n</tool_call>"
)
TAGGED_AT = '{"at": "the \\"{sea}\\"", "n": 7}'
TAGGED_ADD = TAGGED.replace("look", "add.up").replace('the "{sea}"', "1e3")
TAGGED_BOTH = [*a_call(0, "look", TAGGED_AT), *a_call(1, "add.up", '{"at": 1e3, "n": 7}')]


def typed(key: str, text: str) -> str:
    """A call with one parameter."""
    return f"<tool_call>\n<function=look>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"


CALLS: list[tuple[str, str, list[ReplyPart]]] = [
    ("hermes", f"<tool_call>\n{LOOK}\n</tool_call>", a_call(0, "look", AT)),
    ("hermes", f"  \n<tool_call>{LOOK}</tool_call>\n\n", a_call(0, "look", AT)),
    (
        "hermes",
        f"I see.\n<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        [Text("I see."), *BOTH],
    ),
    ("hermes", f"a <tool_call>{LOOK}{ADD}</tool_call>", [Text("a "), *BOTH]),
    ("hermes", f"<tool_call>{LOOK}</tool_call>\n\nDone.", [*a_call(0, "look", AT), Text("\n\nDone.")]),
    ("hermes", f"<tool_call>{LOOK}<tool_call>{ADD}", BOTH),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>', a_call(0, "x", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "x"}</tool_call>', a_call(0, "x", "{}")),
    ("hermes", '<tool_call>{"name": "x", "arguments": null, "id": "q"}</tool_call>', a_call(0, "x", "{}")),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', a_call(0, "x", '{"a": 1}')),
    ("hermes", '<tool_call>{"id": [1, {"a": "}"}], "name": "x", "arguments": {}}</tool_call>', a_call(0, "x", "{}")),
    ("qwen3_coder", TAGGED, a_call(0, "look", TAGGED_AT)),
    ("qwen3_coder", f"I see.\n{TAGGED}\n{TAGGED_ADD}\n", [Text("I see."), *TAGGED_BOTH]),
    ("qwen3_coder", TAGGED.replace("\n", "", 3), a_call(0, "look", TAGGED_AT)),
    ("qwen3_coder", TAGGED.partition("\n")[2], a_call(0, "look", TAGGED_AT)),
    ("qwen3_coder", TAGGED + " Done.", [*a_call(0, "look", TAGGED_AT), Text(" Done.")]),
    ("qwen3_coder", "<tool_call><function=x></function></tool_call>", a_call(0, "x", "{}")),
    ("qwen3_coder", "<tool_call><function=x><parameter=k>1</parameter>{", [*a_call(0, "x", '{"k": 1}'), Text("{")]),
    ("qwen3_coder", typed("n", "-12"), a_call(0, "look", '{"n": -12}')),
    ("qwen3_coder", typed("n", "twelve"), a_call(0, "look", '{"n": "twelve"}')),
    ("qwen3_coder", typed("n", "1.5"), a_call(0, "look", '{"n": "1.5"}')),
    ("qwen3_coder", typed("n", "NaN"), a_call(0, "look", '{"n": "NaN"}')),
    ("qwen3_coder", typed("deep", "True"), a_call(0, "look", '{"deep": true}')),
    ("qwen3_coder", typed("list", '[1, "</parameter>"]'), a_call(0, "look", '{"list": [1, "</parameter>"]}')),
    ("qwen3_coder", typed("list", "[1"), a_call(0, "look", '{"list": "[1"}')),
    ("qwen3_coder", typed("maybe", "null"), a_call(0, "look", '{"maybe": null}')),
    ("qwen3_coder", typed("maybe", "None"), a_call(0, "look", '{"maybe": "None"}')),
    ("qwen3_coder", typed("any", '{"a": [1]}'), a_call(0, "look", '{"any": {"a": [1]}}')),
    ("qwen3_coder", typed("any", '"quoted"'), a_call(0, "look", '{"any": "\\"quoted\\""}')),
    ("qwen3_coder", typed("odd", "[1]"), a_call(0, "look", '{"odd": [1]}')),
    ("qwen3_coder", typed("odder", "7"), a_call(0, "look", '{"odder": 7}')),
    ("qwen3_coder", typed("at", "1\n\n"), a_call(0, "look", '{"at": "1\\n\\n"}')),
    ("qwen3_coder", typed("at", "x < </paramete"), a_call(0, "look", '{"at": "x < </paramete"}')),
    ("llama3_json", '{"name": "look", "parameters": {"a": 1}}', a_call(0, "look", '{"a": 1}')),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', a_call(0, "other", "{}")),
    (
        "llama3_json",
        '\n{"name": "look", "parameters": {}}; {"name": "add.up", "parameters": {}}',
        [*a_call(0, "look", "{}"), *a_call(1, "add.up", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS] [{LOOK}, {ADD}]", BOTH),
    ("mistral", f"Well[TOOL_CALLS][{LOOK}]", [Text("Well"), *a_call(0, "look", AT)]),
    ("mistral", f"[TOOL_CALLS]look[ARGS]{AT}", a_call(0, "look", AT)),
    ("mistral", f"[TOOL_CALLS]look[CALL_ID]aB3[ARGS]{AT}", a_call(0, "look", AT)),
    ("mistral", f"[TOOL_CALLS]look{AT}[TOOL_CALLS]add.up[ARGS]{{}}", BOTH),
    ("json", LOOK, a_call(0, "look", AT)),
    ("json", f" [{LOOK},\n{ADD}]\n", BOTH),
    ("json", f"{LOOK} and so on", [*a_call(0, "look", AT), Text(" and so on")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), CALLS)
def test_calls_are_read_wherever_their_text_is_cut(name: str, text: str, parts: list[ReplyPart]) -> None:
    """Arguments stay verbatim; blanks around calls belong to the syntax."""
    assert every_split(lambda: tool_reader(name), text) == parts


TEXTS = [
    ("hermes", "Hello <tool> </tool_call> <tool_cal"),
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
    ("hermes", 'so\n<tool_call>{"nom": 1}</tool_call> it is'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", }'),
    ("hermes", '<tool_call>\n{"name": "f"'),
    ("hermes", "  \n "),
    ("hermes", LOOK),
    ("qwen3_coder", "<tool_call>\nno tag\n</tool_call>"),
    ("qwen3_coder", "see <function=nobody><parameter=a>1</parameter></function>"),
    ("qwen3_coder", "<tool_call><function=f g></function>"),
    ("qwen3_coder", "<tool_call><function=f>text</function>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<param"),
    ("qwen3_coder", "<function=" + "x" * 300),
    ("qwen3_coder", LOOK),
    ("llama3_json", '{"name": "nobody", "parameters": {}}'),
    ("llama3_json", '{"a": 1}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", f"Text first {LOOK}"),
    ("mistral", "[TOOL_CALLS] hello there"),
    ("mistral", "[TOOL_CALLS] not a name {}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]"),
    ("json", "[1, 2, 3]"),
    ("json", "[]"),
    ("json", '{"name": "Bob", "arguments": {}}'),
    ("json", " {"),
]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_is_text_to_the_last_character(name: str, text: str) -> None:
    """Malformed calls too, with their markers."""
    assert every_split(lambda: tool_reader(name), text) == [Text(text)]


@pytest.mark.parametrize("end", ["", '"', '": [1', '": [1, "}'])
def test_an_unfinished_call_is_given_as_it_stands(end: str) -> None:
    """As OpenAI does when max_tokens cuts an answer."""
    text = f'<tool_call>{{"name": "f", "arguments": {{"a{end}'

    assert every_split(lambda: tool_reader("hermes"), text) == a_call(0, "f", '{"a' + end)


@pytest.mark.parametrize(
    ("text", "said"),
    [("<parameter=at>\nLis", '{"at": "Lis'), ("<parameter=n>\n4", '{"n": '), ("<parameter=at", "{")],
)
def test_an_unfinished_call_in_tags_is_given_as_far_as_it_is_certain(text: str, said: str) -> None:
    """A string to its last character."""
    assert every_split(lambda: tool_reader("qwen3_coder"), f"<tool_call>\n<function=look>\n{text}") == a_call(
        0, "look", said
    )


def test_strings_in_tags_come_as_they_are_said() -> None:
    """A long text is not waited for; what may be its end is withheld."""
    reader = tool_reader("qwen3_coder")
    begun = reader.feed('<tool_call>\n<function=look>\n<parameter=at>\none "')
    more = reader.feed("two\n</par")
    rest = reader.feed("t\n")

    assert begun == [CallBegun(0, "id-0", "look"), CallArguments(0, '{"at": "one \\"')]
    assert more == [CallArguments(0, "two")]
    assert rest == [CallArguments(0, "\\n</part")]


def test_arguments_come_as_they_are_said() -> None:
    """A long text in them is not waited for."""
    reader = tool_reader("hermes")
    begun = reader.feed('<tool_call>\n{"name": "write", "arguments": {"text": "one')
    more = reader.feed(" two")

    assert begun == [CallBegun(0, "id-0", "write"), CallArguments(0, '{"text": "one')]
    assert more == [CallArguments(0, " two")]


def test_text_that_cannot_begin_a_marker_is_not_withheld() -> None:
    """Only as much as may be one is."""
    reader = tool_reader("hermes")

    assert reader.feed("a < b") == [Text("a < b")]
    assert reader.feed(" <tool") == [Text(" ")]
    assert reader.feed("box") == [Text("<toolbox")]


SYNTAX = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "{", "}", "[", "]", ",",
    ";", ":", '"', "\\", '"name"', '"arguments"', '"parameters"', '"look"', "look", " ", "\n", "null", "1", "é",
    '{"name": "look", "arguments": ', '{"a": 1}', LOOK, "<function=", "look>", "<parameter=", "at>", "n>",
    "</parameter>", "</function>", TAGGED,
]  # fmt: skip

PARSERS = ["hermes", "qwen3_coder", "llama3_json", "mistral", "json"]
SPOKEN = st.lists(st.sampled_from(SYNTAX), max_size=14)


@given(name=st.sampled_from(PARSERS), pieces=SPOKEN, places=st.data())
@example(name="json", pieces=["{", "}", LOOK], places=None)
def test_any_text_reads_the_same_however_it_is_cut(name: str, pieces: list[str], places: st.DataObject | None) -> None:
    """And without calls it is all there."""
    text = "".join(pieces)
    whole = read(tool_reader(name), [text])
    cuts = sorted(places.draw(st.sets(st.integers(0, len(text)), max_size=6))) if places is not None else [1]
    edges = [0, *cuts, len(text)]

    assert read(tool_reader(name), [text[start:end] for start, end in itertools.pairwise(edges)]) == whole
    assert read(tool_reader(name), text) == whole
    if not any(isinstance(part, CallBegun) for part in whole):
        assert whole == ([Text(text)] if text else [])


PROSE = st.text(alphabet='ab <[{}]>"\\\n', min_size=1, max_size=30)


@given(before=PROSE, after=PROSE)
def test_text_around_calls_is_all_there(before: str, after: str) -> None:
    """But for blanks alone, and the one line break in front of the first call."""
    parts = read(tool_reader("hermes"), [f"{before}\n<tool_call>{LOOK}</tool_call>{after}"])
    texts = [part.text for part in parts if isinstance(part, Text)]

    assert "".join(texts) == (before if before.strip() else "") + (after if after.strip() else "")
    assert [part for part in parts if not isinstance(part, Text)] == a_call(0, "look", AT)
