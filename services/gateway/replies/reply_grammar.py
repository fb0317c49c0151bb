"""Grammars of whole answers, in llguidance's dialect of Lark: reasoning, then tool calls, text, or either.

The model must write its own format: markers that are special tokens are given by id, everything else as text. Free
text ends where a call's marker begins, and from there on the call's grammar applies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.grammars.requested import ANY_OBJECT
from services.gateway.grammars.schemas import json_rule
from services.gateway.replies.formats import CallShape, ToolFormat
from services.gateway.replies.reasoning_reader import BREAKS_BEHIND, ReasoningSyntax
from services.gateway.replies.tagged_grammar import TaggedArguments
from services.gateway.replies.tagged_scanner import FUNCTION
from services.gateway.replies.tool_choice import ToolAsk
from shared.errors import InvalidRequest
from shared.messages.requests import Grammar

MAX_CALLS = 16
"""Limit on the calls of one answer under a grammar."""

_ANYTHING = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before the rest of an answer; ``is_open``: the prompt has begun it."""

    syntax: ReasoningSyntax
    is_open: bool


def reply_grammar(
    text: Grammar | None,
    thinking: Thinking | None,
    calls: tuple[ToolFormat, ToolAsk] | None,
    *,
    specials: Mapping[str, int],
) -> Grammar | None:
    """Return the grammar of an answer; None where it may be any text.

    ``text`` is the grammar of text outside of calls, ``specials`` are the ids of special tokens by text. Raises
    InvalidRequest for a ``text`` that cannot be part of another grammar, and for schemas that cannot be enforced.
    """
    if calls is not None and not _is_bound(calls[1]) and text is None:
        calls = None
    if calls is None and (text is None or thinking is None):
        return text
    rules = _Rules(specials)
    answer = rules.calls(*calls, text, thinking) if calls is not None else rules.text(text)
    start = f"{rules.thinking(thinking)} answer" if thinking is not None else "answer"
    return Grammar(
        kind="lark", text="\n".join(["%llguidance {}", f"start: {start}", f"answer: {answer}", *rules.lines])
    )


def _is_bound(ask: ToolAsk) -> bool:
    """Return whether calls are constrained at all."""
    return ask.is_forced or not ask.is_parallel or any(tool.is_strict for tool in ask.tools)


class _Rules:
    """The rules of one grammar; each method adds those of its part and returns the text that refers to them."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._specials = specials
        self._any_special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")

    def thinking(self, thinking: Thinking) -> str:
        syntax = thinking.syntax
        self.lines.append(f"thought: {self._until(syntax.closer, 'THOUGHT')} BREAKS?")
        self.lines.append(f"BREAKS: /\\n{{1,{BREAKS_BEHIND}}}/")
        if not thinking.is_open:
            return f"({self._literal(syntax.opener)} thought)?"
        return f"{self._literal(syntax.opener)}? thought" if syntax.opener in self._specials else "thought"

    def text(self, grammar: Grammar | None) -> str:
        assert grammar is not None, "the text has a grammar"
        if grammar.kind == "json_schema":
            return _json(grammar.text, param="response_format")
        if grammar.kind == "regex":
            return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text) + "/"
        raise InvalidRequest(
            "a grammar in Lark or GBNF cannot be combined with tools or with a model that reasons",
            code="unsupported_parameter",
        )

    def calls(
        self,
        format_: ToolFormat,
        ask: ToolAsk,
        text: Grammar | None,
        thinking: Thinking | None,
    ) -> str:
        for number, tool in enumerate(ask.tools):
            schema = tool.parameters if ask.is_forced or tool.is_strict else ANY_OBJECT
            self._arguments(f"arguments_{number}", schema, format_, param=f"{tool.param}.function.parameters")
        shape, opener = format_.shape, format_.syntax.opener
        self.lines.append(f"call: {self._call(shape, ask, shape.before)}")
        group = self._group(shape, "call", ask.is_parallel)
        if ask.is_forced:
            return group
        if text is not None:
            return f"({group}) | {self.text(text)}"
        # Text must not begin with the marker of reasoning, or calls could stand within text read as reasoning.
        mark = thinking.syntax.opener if thinking is not None else ""
        without = f" & ~/{_quoted(mark)}(?s:.*)/" if mark and mark not in self._specials else ""
        if not (opener and (shape.begin + shape.before).startswith(opener)):
            # Text must not begin like a call, or a call could be written outside of the grammar.
            self.lines.append(f"FREE: /\\s*[^\\s{{\\[](?s:.*)/{without}")
            return f"({group}) | FREE?"
        if format_.syntax.is_tagged:  # It would be read as a call otherwise.
            without += f" & ~/(?s:.*){_quoted(FUNCTION)}(?s:.*)/"
        return self._between_text(shape, ask, opener, without)

    def _arguments(self, name: str, schema: dict[str, Any], format_: ToolFormat, *, param: str) -> None:
        if format_.syntax.is_tagged:
            self.lines += TaggedArguments(name, schema, param=param).lines
        else:
            self.lines.append(f"{name}: {_json(schema, param=param)}")

    def _between_text(self, shape: CallShape, ask: ToolAsk, opener: str, without: str) -> str:
        """Return rules of free text, and of calls from their marker on."""
        if shape.begin:
            first, begin = "call", shape.begin[len(opener) :]
            group = self._group(shape, first, ask.is_parallel, begin)
        else:
            self.lines.append(f"marked_call: {self._call(shape, ask, shape.before[len(opener) :])}")
            group = "marked_call"
        self.lines.append(f"said: {self._until(opener, 'SAID', without)} {group}")
        self.lines.append(f"FREE: {_ANYTHING}{without}")
        return f"said{{0,{MAX_CALLS}}} FREE?" if ask.is_parallel else "said | FREE?"

    def _call(self, shape: CallShape, ask: ToolAsk, before: str) -> str:
        ways = []
        for number, tool in enumerate(ask.tools):
            name = json.dumps(tool.name)[1:-1] if shape.name_is_json else tool.name
            head, tail = self._literal(before + name + shape.middle), self._literal(shape.after)
            ways.append(f"{head} arguments_{number} {tail}".rstrip())
        return " | ".join(ways)

    def _group(self, shape: CallShape, call: str, is_parallel: bool, begin: str | None = None) -> str:
        between, more = self._literal(shape.between), f"{{0,{MAX_CALLS - 1}}}"
        if shape.list_when_many:
            many = f' | "[" {call} ({between} {call}){more} "]"' if is_parallel else ""
            return f"{call}{many}"
        calls = f"{call} ({between} {call}){more}" if is_parallel else call
        return " ".join(
            part
            for part in (self._literal(shape.begin if begin is None else begin), calls, self._literal(shape.end))
            if part
        )

    def _until(self, marker: str, name: str, without: str = "") -> str:
        """Return a rule of any text up to and including ``marker``."""
        if marker in self._specials:
            self.lines.append(f"{name}: {_ANYTHING}{without}")
            return f"{name}? <[{self._specials[marker]}]>"
        self.lines.append(f"{name}: /(?s:.*){_quoted(marker)}/{without}")
        self.lines.append(f"{name.lower()}_end[lazy]: {name}")
        return f"{name.lower()}_end"

    def _literal(self, text: str) -> str:
        """Return ``text`` in a rule, its special tokens by id."""
        parts, start = [], 0
        for found in self._any_special.finditer(text):
            if start < found.start():
                parts.append(json.dumps(text[start : found.start()], ensure_ascii=False))
            parts.append(f"<[{self._specials[found[0]]}]>")
            start = found.end()
        if start < len(text):
            parts.append(json.dumps(text[start:], ensure_ascii=False))
        return " ".join(parts)


def _json(schema: object, *, param: str) -> str:
    """Return a rule of JSON valid under ``schema``. A ``%json`` in one of its texts must not be read as a rule."""
    keyword, _, text = json_rule(schema, param=param).partition(" ")
    return f"{keyword} " + text.replace("%", "\\u0025")


def _quoted(text: str) -> str:
    """Return a regular expression between slashes that matches only ``text``."""
    return re.sub(r"[^A-Za-z0-9_ ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
