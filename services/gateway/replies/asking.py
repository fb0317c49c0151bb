"""What a request means for its answers: the grammar that they keep to, and how each is read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.replies.choosing import ReplyFormats
from services.gateway.replies.reading import Reply
from services.gateway.tokenizer import Tokenizer
from shared.messages.requests import Grammar


@dataclass(frozen=True, slots=True)
class AskedReply:
    """``new_reply`` makes the reply of one choice from its request id, on which the ids of its calls depend.

    ``grammar`` joins that of the text, if any, with what tools and reasoning need; ``shown_special_tokens`` are those
    that the worker must not leave out of the text, because they mark parts.
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
    """``prompt`` is the tokenised conversation: it may end within reasoning. Raises InvalidRequest."""
    return AskedReply(grammar=text_grammar)
