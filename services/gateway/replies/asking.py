"""From a request to its answers' form: the grammar that constrains them, and how each is read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.replies.call_ids import call_id
from services.gateway.replies.choosing import ReplyFormats
from services.gateway.replies.parts import PlainReader, ReplyReader
from services.gateway.replies.reading import Reply
from services.gateway.replies.reasoning_reader import ReasoningCount, ReasoningReader
from services.gateway.replies.reply_grammar import Thinking, reply_grammar
from services.gateway.replies.tool_choice import asked_tools
from services.gateway.replies.tool_reader import ToolReader
from services.gateway.tokenizer import Tokenizer
from shared.errors import InvalidRequest
from shared.messages.requests import Grammar

PROMPT_END_TOKENS = 32
"""Tokens at a prompt's end that are decoded: more than a marker of reasoning and the blanks behind it have."""


@dataclass(frozen=True, slots=True)
class AskedReply:
    """The form of a request's answers.

    ``new_reply`` makes the reply of one choice from its request id, on which the ids of its calls depend. ``grammar``
    combines that of the text, if any, with those of tools and reasoning; the worker must keep ``shown_special_tokens``
    in the text, because they mark parts.
    """

    grammar: Grammar | None = None
    shown_special_tokens: tuple[int, ...] = ()
    new_reply: Callable[[str], Reply] = lambda request_id: Reply()


def ask_reply(
    formats: ReplyFormats,
    tokenizer: Tokenizer,
    request: ChatRequest,
    prompt: Sequence[int],
    *,
    text_grammar: Grammar | None = None,
) -> AskedReply:
    """Return the form of the answers to a request. Raises InvalidRequest.

    ``prompt`` is the tokenised conversation; it may end within reasoning.
    """
    ask = asked_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if ask is not None and formats.tools is None:
        if ask.is_forced:
            raise InvalidRequest(
                "a call cannot be forced: --tool-parser is none, or knows no format of this model's chat template",
                param="tool_choice",
                code="unsupported_parameter",
            )
        ask = None
    thinking = _thinking(formats, tokenizer, prompt)
    if ask is None and thinking is None:
        return AskedReply(grammar=text_grammar)
    if ask is not None and ask.is_forced and not formats.traits.takes_many_calls:
        ask = replace(ask, is_parallel=False)  # The template could not render several.
    calls = (formats.tools, ask) if formats.tools is not None and ask is not None else None
    specials = tokenizer.specials_by_text
    markers = [*(calls[0].syntax.markers if calls else ()), *(thinking.syntax.markers if thinking else ())]

    def new_reply(request_id: str) -> Reply:
        reader: ReplyReader = PlainReader()
        if calls is not None:
            is_short = formats.traits.has_short_ids
            reader = ToolReader(
                calls[0].syntax,
                schemas={tool.name: tool.parameters for tool in calls[1].tools},
                new_id=lambda index: call_id(request_id, index, is_short=is_short),
            )
        count = None
        if thinking is not None:
            reader = ReasoningReader(thinking.syntax, reader, begins_inside=thinking.is_open)
            count = ReasoningCount(thinking.syntax, tokenizer.texts.bytes, begins_inside=thinking.is_open)
        return Reply(reader, count, is_named=ask is not None and ask.mode == "named")

    return AskedReply(
        grammar=reply_grammar(text_grammar, thinking, calls, specials=specials),
        shown_special_tokens=tuple(sorted({specials[marker] for marker in markers if marker in specials})),
        new_reply=new_reply,
    )


def _thinking(formats: ReplyFormats, tokenizer: Tokenizer, prompt: Sequence[int]) -> Thinking | None:
    if formats.reasoning is None:
        return None
    end = tokenizer.decode(list(prompt[-PROMPT_END_TOKENS:]))
    return Thinking(formats.reasoning, formats.reasoning.is_open_behind(end))
