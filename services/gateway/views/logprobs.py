"""Logprobs in the shapes of both endpoints. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from services.gateway.openai_schema.chat import ChatLogprob, ChatLogprobs, TopLogprob
from services.gateway.openai_schema.completions import CompletionLogprobs
from services.gateway.openai_schema.usage import PromptLogprob
from services.gateway.token_text import TokenTexts
from shared.messages.tokens import TokenLogprob

_REPLACEMENT = "\ufffd"

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, the logprob of a token that sampling excludes, which JSON does not have."""


def finite(logprob: float) -> float:
    """Return the logprob, at least :data:`LEAST_LOGPROB`."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, texts: TokenTexts) -> ChatLogprobs:
    """Return the logprob of each token, with the ``top`` most likely tokens at its position."""
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


class TextOffsets:
    """Offsets of tokens in a text, in characters.

    A token that begins within a character has that character's offset. A special token that the text does not have
    takes no characters.
    """

    def __init__(
        self, texts: TokenTexts, *, special: Collection[int] = (), echo: str = "", skips_special: bool = True
    ) -> None:
        """Begin at offset 0; ``texts`` have the bytes of each token, ``special`` are the ids of special ones.

        ``echo`` is the text of the prompt where the answer begins with it. Behind it, special tokens are left out if
        ``skips_special``.
        """
        self._texts = texts
        self._special, self._echo, self._skips_special = special, echo, skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def place(self, token: int) -> int:
        """Return the offset of the next token."""
        at = self._characters
        if token not in self._special or self._is_shown(token, at):
            self._characters += len(self._decoder.decode(self._texts.bytes(token)))
        return at

    def _is_shown(self, special: int, at: int) -> bool:
        if at < len(self._echo):
            return self._echo.startswith(self._texts.text(special), at)
        return not self._skips_special


def completion_logprobs(
    entries: Sequence[TokenLogprob | None],
    top: int,
    texts: TokenTexts,
    offsets: TextOffsets,
    *,
    first_token: int | None = None,
) -> CompletionLogprobs:
    """Return lists with one entry a token. ``offsets`` continues behind the tokens before them.

    An entry may be None (the first token of a prompt, which has no logprob): then ``first_token`` names it.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    places: list[int] = []
    for entry in entries:
        token = entry.token if entry is not None else first_token
        tokens.append(token_name(token, texts) if token is not None else "")
        places.append(offsets.place(token) if token is not None else 0)
        logprobs.append(finite(entry.logprob) if entry is not None else None)
        tops.append(_top(entry, top, texts) if entry is not None else None)
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=tops, text_offset=places)


def token_name(token: int, texts: TokenTexts) -> str:
    """Return a token's text, or its bytes where it holds part of a character.

    The bytes are as OpenAI writes them, which are unique.
    """
    text = texts.text(token)
    if _REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in texts.bytes(token))


def prompt_logprob_list(
    entries: Sequence[TokenLogprob | None], top: int, texts: TokenTexts
) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's ``prompt_logprobs``: by token id, the prompt's own token and the ``top`` most likely ones."""
    return [None if entry is None else _by_token_id(entry, top, texts) for entry in entries]


def _top(entry: TokenLogprob, top: int, texts: TokenTexts) -> dict[str, float]:
    """Return logprobs by name, most likely first, and the chosen token.

    Of two tokens with one name, the second goes by its id.
    """
    named: dict[str, int] = {}
    found: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token, entry.logprob)):
        name = token_name(token, texts)
        if named.setdefault(name, token) != token:
            name = f"token_id:{token}"
        found.setdefault(name, finite(logprob))
    return found


def _by_token_id(entry: TokenLogprob, top: int, texts: TokenTexts) -> dict[str, PromptLogprob]:
    found = {
        str(token): PromptLogprob(logprob=finite(logprob), rank=place, decoded_token=texts.text(token))
        for place, (token, logprob) in enumerate(entry.top[:top], start=1)
    }
    rank = entry.rank or None
    found.setdefault(
        str(entry.token),
        PromptLogprob(logprob=finite(entry.logprob), rank=rank, decoded_token=texts.text(entry.token)),
    )
    return found
