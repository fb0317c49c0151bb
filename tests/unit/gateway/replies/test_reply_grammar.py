"""Grammars of answers: the model's own format is let through, anything else is not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from services.gateway.assembly import Delta
from services.gateway.grammars.checking import check_lark
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest
from services.gateway.replies.asking import AskedReply, ask_reply
from services.gateway.replies.choosing import ReplyFormats
from services.gateway.replies.formats import THINK, ToolFormat, tool_format
from services.gateway.replies.parts import CallBegun, Text
from services.gateway.replies.reading import Reply
from services.gateway.replies.reasoning_reader import ReasoningSyntax
from services.gateway.replies.template_traits import TemplateTraits
from shared.errors import InvalidRequest
from shared.grammars import compile_grammar, token_table
from shared.messages.requests import Grammar
from tests.unit.gateway.replies import families

LOOK = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "looks", "parameters": {"type": "object", "properties": {}}}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "look"}}


class Cell:
    """A tokenizer, and what its sampler lets through."""

    def __init__(self, path: Path, specials: tuple[str, ...]) -> None:
        self.tokenizer = families.family_tokenizer(path, families.HERMES, specials=specials)
        self._tokens = token_table((path / "tokenizer.json").read_text(encoding="utf-8"), 310, [2])

    def lets_through(self, grammar: Grammar | None, text: str) -> bool:
        """Whether ``text`` is a whole answer."""
        assert grammar is not None
        check_lark(grammar.text)
        matcher = compile_grammar(self._tokens, grammar)
        tokens = self.tokenizer.encode_now(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Cell]]:
    """With markers that are special tokens, and with markers that are text."""
    paths = {is_special: tmp_path_factory.mktemp(f"special-{is_special}") for is_special in (True, False)}
    made = {is_special: Cell(path, families.SPECIALS if is_special else ()) for is_special, path in paths.items()}
    yield made
    for cell in made.values():
        cell.tokenizer.close()


@lru_cache
def form(name: str) -> ToolFormat:
    found = tool_format(*name.split(":")) if ":" in name else tool_format(name, "")
    assert found is not None
    return found


def ask(
    cell: Cell,
    name: str,
    *,
    thinking: ReasoningSyntax | None = None,
    prompt: str = "",
    text_grammar: Grammar | None = None,
    traits: TemplateTraits = TemplateTraits(),  # noqa: B008
    **fields: Any,
) -> AskedReply:
    request = ChatRequest(messages=[ChatMessage(role="user", content="q")], **{"tools": TOOLS, **fields})
    formats = ReplyFormats(form(name), thinking, traits)
    tokens = cell.tokenizer.encode_now(prompt, add_special_tokens=False)
    return ask_reply(formats, cell.tokenizer, request, tokens, text_grammar=text_grammar)


ONE = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "look", "parameters": {"n": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"n": 1}}]',
    "mistral:[ARGS]": '[TOOL_CALLS]look[ARGS]{"n": 1}',
    "json": '{"name": "look", "arguments": {"n": 1}}',
}
TWO = {
    "hermes": f'{ONE["hermes"]}\n<tool_call>\n{{"name": "looks", "arguments": {{"a": []}}}}\n</tool_call>',
    "qwen3_coder": ONE["qwen3_coder"] + "\n" + ONE["qwen3_coder"].replace("look", "looks").replace("=n>", "=a>"),
    "llama3_json": ONE["llama3_json"] + '; {"name": "looks", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "looks", "arguments": {}}]',
    "mistral:[ARGS]": ONE["mistral:[ARGS]"] + "[TOOL_CALLS]looks[ARGS]{}",
    "json": f'[{ONE["json"]}, {{"name": "looks", "arguments": {{}}}}]',
}
EVERY = pytest.mark.parametrize("name", ONE)
BOTH = pytest.mark.parametrize("is_special", [True, False])


@EVERY
@BOTH
def test_required_calls_are_said_in_the_models_own_format(name: str, is_special: bool, cells: dict[bool, Cell]) -> None:
    """One or more, of any tool, with valid arguments; no text."""
    cell = cells[is_special]
    grammar = ask(cell, name, tool_choice="required").grammar

    assert cell.lets_through(grammar, ONE[name])
    assert cell.lets_through(grammar, TWO[name])
    assert not cell.lets_through(grammar, "Hello")
    assert not cell.lets_through(grammar, "")
    assert not cell.lets_through(grammar, ONE[name].replace("1", '"x"'))
    assert not cell.lets_through(grammar, ONE[name].replace("look", "other"))


@EVERY
@BOTH
def test_without_parallel_calls_there_is_one(name: str, is_special: bool, cells: dict[bool, Cell]) -> None:
    """Whether it must be made or may be."""
    cell = cells[is_special]
    forced = ask(cell, name, tool_choice="required", parallel_tool_calls=False).grammar
    free = ask(cell, name, parallel_tool_calls=False).grammar

    assert cell.lets_through(forced, ONE[name])
    assert not cell.lets_through(forced, TWO[name])
    assert cell.lets_through(free, ONE[name])
    assert not cell.lets_through(free, TWO[name])
    assert cell.lets_through(free, "Hello {there}")
    assert cell.lets_through(free, "")


@EVERY
@BOTH
def test_a_named_tool_is_called_once(name: str, is_special: bool, cells: dict[bool, Cell]) -> None:
    """And no other."""
    cell = cells[is_special]
    grammar = ask(cell, name, tool_choice=NAMED).grammar

    assert cell.lets_through(grammar, ONE[name])
    assert not cell.lets_through(grammar, TWO[name])
    assert not cell.lets_through(grammar, ONE[name].replace("look", "looks"))


@EVERY
@BOTH
def test_strict_tools_bind_arguments_where_a_call_begins(name: str, is_special: bool, cells: dict[bool, Cell]) -> None:
    """Text stays free, and a tool that is not strict takes any object."""
    cell = cells[is_special]
    grammar = ask(cell, name, tools=STRICT).grammar

    assert cell.lets_through(grammar, ONE[name])
    assert cell.lets_through(grammar, TWO[name])
    assert cell.lets_through(grammar, "Just text, {} and <so> on.")
    assert not cell.lets_through(grammar, ONE[name].replace("1", '"x"'))
    if not form(name).syntax.is_bare:
        assert cell.lets_through(grammar, "I see.\n" + ONE[name])
        assert cell.lets_through(grammar, ONE[name] + "\nDone.")


@BOTH
def test_tools_that_bind_nothing_need_no_grammar(is_special: bool, cells: dict[bool, Cell]) -> None:
    """Nor does tool_choice none."""
    assert ask(cells[is_special], "hermes").grammar is None
    assert ask(cells[is_special], "hermes", tool_choice="none", tools=STRICT).grammar is None


@BOTH
@pytest.mark.parametrize("name", ["hermes", "json"])
def test_reasoning_goes_before_calls(name: str, is_special: bool, cells: dict[bool, Cell]) -> None:
    """It is closed before they begin, whether the prompt opened it or the model does."""
    cell = cells[is_special]
    opened = ask(cell, name, thinking=THINK, prompt="q<think>\n", tool_choice="required").grammar
    closed = ask(cell, name, thinking=THINK, prompt="q<think>\n\n</think>\n\n", tool_choice="required").grammar
    free = ask(cell, name, thinking=THINK, prompt="q", tools=STRICT).grammar
    wrong = ONE[name].replace("1", '"x"')

    assert cell.lets_through(opened, f"hm {{\n</think>\n\n{ONE[name]}")
    assert not cell.lets_through(opened, ONE[name])
    assert cell.lets_through(closed, ONE[name])
    assert cell.lets_through(closed, f"<think>hm</think>{ONE[name]}")
    # Where a marker is a special token, reasoning has none of them.
    thought = "hm" if is_special else f"hm {wrong}"
    assert cell.lets_through(free, f"<think>\n{thought}\n</think>\n\n{ONE[name]}")
    assert cell.lets_through(free, "<think>hm</think>Hello")
    assert cell.lets_through(free, "Hello")
    assert not cell.lets_through(free, f"<think>hm</think>{wrong}")


@BOTH
def test_a_schema_of_the_text_holds_behind_reasoning_and_beside_calls(
    is_special: bool, cells: dict[bool, Cell]
) -> None:
    """The answer is either."""
    cell = cells[is_special]
    number = Grammar(kind="json_schema", text='{"type": "integer"}')
    path = Grammar(kind="regex", text="a/b|[0-9]+")
    thought = ask(cell, "hermes", thinking=THINK, prompt="<think>", tools=None, text_grammar=number).grammar
    either = ask(cell, "hermes", text_grammar=number).grammar
    paths = ask(cell, "hermes", text_grammar=path).grammar

    assert cell.lets_through(thought, "hm</think>\n\n12")
    assert not cell.lets_through(thought, "hm</think>\n\nx")
    assert cell.lets_through(either, "12")
    assert cell.lets_through(either, ONE["hermes"])
    assert not cell.lets_through(either, "Hello")
    assert cell.lets_through(paths, "a/b")
    assert not cell.lets_through(paths, "ab")
    assert ask(cell, "hermes", tools=None, text_grammar=number).grammar is number


def test_a_grammar_of_ones_own_goes_with_no_other(cells: dict[bool, Cell]) -> None:
    """It is refused rather than left aside."""
    own = Grammar(kind="lark", text='start: "a"')
    with pytest.raises(InvalidRequest):
        ask(cells[True], "hermes", text_grammar=own)

    assert ask(cells[True], "hermes", tools=None, text_grammar=own).grammar is own


@EVERY
def test_special_tokens_that_mark_parts_are_shown(name: str, cells: dict[bool, Cell]) -> None:
    """Markers of the model's format alone, and only where its tokenizer has them as special tokens."""
    special = cells[True].tokenizer.specials_by_text
    asked = ask(cells[True], name, thinking=THINK)
    wanted = {*form(name).syntax.markers, "<think>", "</think>"} & special.keys()

    assert asked.shown_special_tokens == tuple(sorted(special[text] for text in wanted))
    assert ask(cells[False], name, thinking=THINK).shown_special_tokens == ()


@EVERY
def test_what_the_grammar_lets_through_is_read_as_calls(name: str, cells: dict[bool, Cell]) -> None:
    """The two halves of a format agree."""
    reply: Reply = ask(cells[True], name).new_reply("chatcmpl-1-0")
    parts = reply.read(Delta(text=TWO[name], finish="stop"))

    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["look", "looks"]
    assert not any(isinstance(part, Text) for part in parts)
    assert reply.finish_reason("stop") == "tool_calls"
    assert reply.finish_reason("length") == "length"


def test_a_template_that_gives_back_one_call_is_made_to_say_one(cells: dict[bool, Cell]) -> None:
    """The next turn could not be rendered otherwise."""
    cell, traits = cells[True], TemplateTraits(takes_many_calls=False)
    grammar = ask(cell, "llama3_json", tool_choice="required", traits=traits).grammar

    assert cell.lets_through(grammar, ONE["llama3_json"])
    assert not cell.lets_through(grammar, TWO["llama3_json"])


def test_a_named_call_ends_with_stop(cells: dict[bool, Cell]) -> None:
    """As OpenAI has it; and where no call can be read, none can be forced."""
    reply = ask(cells[True], "hermes", tool_choice=NAMED).new_reply("r")
    parts = reply.read(Delta(text=ONE["hermes"], finish="stop"))

    assert any(isinstance(part, CallBegun) for part in parts)
    assert reply.finish_reason("stop") == "stop"
    request = ChatRequest(messages=[ChatMessage(role="user", content="q")], tools=TOOLS, tool_choice="required")
    with pytest.raises(InvalidRequest, match="cannot be forced"):
        ask_reply(ReplyFormats(), cells[True].tokenizer, request, [1])


def test_names_of_any_allowed_form_stand_in_the_grammar(cells: dict[bool, Cell]) -> None:
    """Points and dashes are no syntax."""
    tools = [{"type": "function", "function": {"name": "a.b-c_D9"}}]
    grammar = ask(cells[True], "hermes", tools=tools, tool_choice="required").grammar

    assert cells[True].lets_through(grammar, ONE["hermes"].replace("look", "a.b-c_D9"))


def test_a_schema_may_speak_of_rules_and_refer_to_itself(cells: dict[bool, Cell]) -> None:
    """Its texts are no part of the grammar, and its definitions are its own."""
    schema = {
        "type": "object",
        "description": '%json is " a rule: /x/',
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
        "$defs": {"n": {"enum": ["100%json", "a\nb"]}},
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    grammar = ask(cells[True], "hermes", tools=tools, tool_choice="required").grammar

    assert cells[True].lets_through(grammar, ONE["hermes"].replace("1", '"100%json"'))
    assert cells[True].lets_through(grammar, ONE["hermes"].replace("1", '"a\\nb"'))
    assert not cells[True].lets_through(grammar, ONE["hermes"])


def test_a_schema_that_cannot_be_kept_to_is_refused_with_its_place(cells: dict[bool, Cell]) -> None:
    """Where it would bind; under auto a tool that is not strict says what it likes."""
    tools = [TOOLS[0], {"type": "function", "function": {"name": "x", "parameters": {"nullable": True}}}]
    with pytest.raises(InvalidRequest) as refusal:
        ask(cells[True], "hermes", tools=tools, tool_choice="required")

    assert refusal.value.param == "tools[1].function.parameters"
    assert ask(cells[True], "hermes", tools=tools, parallel_tool_calls=False).grammar is not None
