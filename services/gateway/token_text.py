"""The text and the exact bytes of single tokens, for logprobs.

A token may hold part of a character, so its text can contain replacement characters; its bytes are exact for
byte-level and byte-fallback vocabularies, and the text's UTF-8 for any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

CACHED_TOKENS = 65_536

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte for which each printable character stands in byte-level BPE vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class TokenTexts:
    """A cached lookup of tokens' texts and bytes, through two functions of the tokenizer."""

    def __init__(
        self, *, decode: Callable[[int], str], piece: Callable[[int], str | None], byte_level: bool, special: set[int]
    ) -> None:
        """``decode`` gives a token's text, ``piece`` its vocabulary entry (None where there is none)."""
        self._decode = decode
        self._piece = piece
        self._alphabet = byte_level_alphabet() if byte_level else {}
        self._special = special
        self.text = lru_cache(CACHED_TOKENS)(self._text)
        self.bytes = lru_cache(CACHED_TOKENS)(self._bytes)

    def _text(self, token: int) -> str:
        return self._decode(token)

    def _bytes(self, token: int) -> bytes:
        piece = self._piece(token)
        if piece is None:
            return b""
        if token not in self._special:
            byte_token = _BYTE_TOKEN.match(piece)
            if byte_token:
                return bytes([int(byte_token[1], 16)])
            if self._alphabet and all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
        return self._decode(token).encode("utf-8", errors="replace")
