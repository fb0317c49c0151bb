"""The choice of formats by which one model's answers are read, made once when the gateway starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.gateway.replies.formats import ToolFormat, reasoning_syntax, tool_format
from services.gateway.replies.reasoning_reader import ReasoningSyntax
from services.gateway.replies.template_traits import NO_TRAITS, TemplateTraits, template_traits
from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats in which this model calls tools and reasons; None where it does not, or they are not to be read."""

    tools: ToolFormat | None = None
    reasoning: ReasoningSyntax | None = None
    traits: TemplateTraits = NO_TRAITS


def choose_formats(tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ReplyFormats:
    """Return the formats of these names; ``auto`` is the one that the chat template shows."""
    source = tokenizer.template_source
    traits = template_traits(tokenizer.render, source) if source else NO_TRAITS
    has_tools = "tools" in tokenizer.template_variables
    tools = tool_format(tool_parser, source) if has_tools or tool_parser != "auto" else None
    if tools is not None:
        tools = replace(tools, syntax=replace(tools.syntax, joint=traits.joint))
    return ReplyFormats(tools, reasoning_syntax(reasoning_parser, source), traits)
