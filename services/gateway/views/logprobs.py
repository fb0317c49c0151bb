"""Logprobs in the shapes of both endpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.openai_schema.chat import ChatLogprob, ChatLogprobs, TopLogprob
from services.gateway.openai_schema.completions import CompletionLogprobs
from services.gateway.openai_schema.usage import PromptLogprob
from services.gateway.token_text import TokenTexts
from shared.messages.tokens import TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity, which a token that sampling excludes may have."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, texts: TokenTexts) -> ChatLogprobs:
    """``top`` most likely tokens with each."""
    content = [
        ChatLogprob(
            token=texts.text(entry.token),
            logprob=finite(entry.logprob),
            bytes=list(texts.bytes(entry.token)),
            top_logprobs=[
                TopLogprob(token=texts.text(token), logprob=finite(logprob), bytes=list(texts.bytes(token)))
                for token, logprob in entry.top[:top]
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    entries: Sequence[TokenLogprob | None],
    top: int,
    texts: TokenTexts,
    *,
    offset: int,
    first_token: int | None = None,
) -> CompletionLogprobs:
    """Lists of one entry a token. ``offset`` is the character at which they start.

    An entry may be None (the first token of a prompt, which nothing predicts): then ``first_token`` names it.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token = entry.token if entry is not None else first_token
        text = texts.text(token) if token is not None else ""
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        logprobs.append(finite(entry.logprob) if entry is not None else None)
        tops.append(_top(entry, top, texts) if entry is not None and top else None)
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets)


def prompt_logprob_list(
    entries: Sequence[TokenLogprob | None], texts: TokenTexts
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's ``prompt_logprobs``: by token id, the prompt's own token and the most likely ones."""
    return [None if entry is None else _by_token_id(entry, texts) for entry in entries]


def _top(entry: TokenLogprob, top: int, texts: TokenTexts) -> dict[str, float]:
    likely = {texts.text(token): finite(logprob) for token, logprob in entry.top[:top]}
    likely.setdefault(texts.text(entry.token), finite(entry.logprob))
    return likely


def _by_token_id(entry: TokenLogprob, texts: TokenTexts) -> dict[str, PromptLogprob]:
    found = {
        str(token): PromptLogprob(logprob=finite(logprob), rank=place, decoded_token=texts.text(token))
        for place, (token, logprob) in enumerate(entry.top, start=1)
    }
    found.setdefault(
        str(entry.token),
        PromptLogprob(logprob=finite(entry.logprob), rank=None, decoded_token=texts.text(entry.token)),
    )
    return found
