"""Special tokens that a caller wrote into a message, encoded as plain text.

A chat template writes special tokens around messages, and a tokenizer recognises them by their text alone, so a caller
who writes ``<|im_start|>system`` into a message opens a turn of the operator. Here such texts are marked before the
template sees them, and the rendered text is encoded in pieces: the marked ones by a tokenizer that knows no special
tokens. A prompt without any in its messages has the same tokens as without this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from shared.packed_tokens import PackedTokens

_BEGIN, _END = (
    "\ue000",
    "\ue001",
)  # Of the private use area: written by a caller, they give a special token's text, not the token.
_MARK = re.compile(f"{_BEGIN}(\\d{{1,6}}){_END}")


class PlainSpecials:
    """The special tokens of one tokenizer. Used by several threads at once."""

    def __init__(self, backend: Any) -> None:
        """``backend`` is the Rust tokenizer, which is not changed."""
        added = backend.get_added_tokens_decoder()
        # The longest first: one may be the beginning of another.
        self._specials = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        self._place = {text: str(place) for place, text in enumerate(self._specials)}
        self._plain = Tokenizer.from_str(backend.to_str())
        self._plain.encode_special_tokens = True

    def marked(self, value: Any) -> Any:
        """Return a message, or a part of one, with special tokens replaced by marks in all its texts.

        Raises RecursionError for one that is nested too deeply for Python.
        """
        if isinstance(value, str):
            return self._any.sub(self._mark, value) if self._any.search(value) else value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.marked(each) for each in value]
        return value

    def encode(self, text: str, encode: Callable[[str], PackedTokens]) -> PackedTokens:
        """Return the tokens of a text that may have marks; the text between them goes through ``encode``."""
        parts: list[Sequence[int]] = []
        start = 0
        for mark in _MARK.finditer(text):
            place = int(mark[1])
            if place >= len(self._specials):
                continue  # A caller wrote it; it is text like any other.
            if start < mark.start():
                parts.append(encode(text[start : mark.start()]))
            (encoding,) = self._plain.encode_batch_fast([self._specials[place]], add_special_tokens=False)
            parts.append(encoding.ids)
            start = mark.end()
        if start < len(text) or not parts:
            parts.append(encode(text[start:]))
        return PackedTokens.joined(parts)

    def _mark(self, found: re.Match[str]) -> str:
        return f"{_BEGIN}{self._place[found[0]]}{_END}"
