"""How the answers of one model are read: chosen once, when the gateway starts."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats in which this model calls tools and reasons; None where it does not."""

    tools: None = None
    reasoning: None = None


def choose_formats(tokenizer: Tokenizer) -> ReplyFormats:
    """The formats that the chat template shows."""
    return ReplyFormats()
