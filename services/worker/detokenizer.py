"""Tokens to text, one at a time, exactly: the pieces joined are what decoding all tokens at once gives.

No piece ends inside a character, and each token costs a constant amount of work however long the answer is.
Both follow from knowing what the tokenizer's decoder does instead of decoding windows and comparing:

* ``ByteLevel`` (GPT-2, Llama 3, Qwen, ...): every token is some bytes, and their joined UTF-8 is the text.
* chains of ``Replace``, ``ByteFallback``, ``Fuse``, ``Strip`` and ``Metaspace`` (Llama 2, Gemma, Phi-3, T5, ...):
  every token is a piece of text or one byte. A run of bytes is text only if the whole run is valid UTF-8, so it
  is withheld until the run ends.
* anything else decodes a short window of tokens, whose left edge keeps the context that spaces depend on. A run of
  bytes is withheld there, too.

The reference is ``tokenizers.Tokenizer.decode`` (no clean-up of spaces, which would change the model's text).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shared.errors import UnsupportedModel

REPLACEMENT = "\ufffd"

PENDING_TOKENS = 16
"""A window that ends in a replacement character waits for this many tokens at most: no character is longer."""


class TokenStream(Protocol):
    """Text of the tokens of one answer."""

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes; may be empty."""

    def finish(self) -> str:
        """Return the withheld text, with U+FFFD for bytes that are no character."""


class Vocabulary:
    """The tokenizer that all answers share: the decoder's kind and a cache of each token's piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find out how the decoder of ``tokenizer`` joins tokens; :meth:`from_directory` loads that of a checkpoint."""
        self._tokenizer = tokenizer
        self._special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoder = json.loads(tokenizer.to_str())["decoder"]
        links = _flatten(decoder)
        self._chain = None
        self._is_byte_level = [link["type"] for link in links] == ["ByteLevel"]
        if not self._is_byte_level:
            self._chain = _Chain.parse(links)
        self._has_fallback = any(link["type"] == "ByteFallback" for link in links)
        self._pieces: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, model_dir: Path) -> Vocabulary:
        """Load the checkpoint's tokenizer. Raises UnsupportedModel without a usable fast one."""
        try:
            loaded = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
            backend = loaded.backend_tokenizer
        except (OSError, ValueError, AttributeError, ImportError, KeyError) as error:
            raise UnsupportedModel(f"{model_dir} has no usable fast tokenizer: {error}") from error
        return cls(backend)

    def tokenizer_json(self) -> str:
        """Return the whole tokenizer, as in ``tokenizer.json``."""
        text: str = self._tokenizer.to_str()
        return text

    def stream(self, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> TokenStream:
        """Return a fresh stream for one answer. Special tokens among ``shown`` are never left out."""
        hidden = self._special.difference(shown) if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return _ByteStream(self._token_bytes, hidden)
        if self._chain is not None:
            return _PieceStream(self._piece, hidden, self._chain)
        return _WindowStream(self._decode, self._is_within_run, hidden)

    def _piece(self, token: int) -> str | None:
        """Return the vocabulary's piece; None for a number without a token, which decodes to nothing."""
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.id_to_token(token)
        return self._pieces[token]

    def _is_within_run(self, token: int) -> bool:
        """Return whether a run of bytes may go on behind the token; a number without a token ends none."""
        piece = self._piece(token)
        return self._has_fallback and (piece is None or _fallback_byte(piece) is not None)

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            piece = self._piece(token) or ""
            values = [_BYTE_OF_CHARACTER.get(character) for character in piece]
            # An added token may hold characters that stand for no byte; it is taken literally then.
            known = piece.encode() if None in values else bytes(value for value in values if value is not None)
            self._bytes[token] = known
        return known

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


class _ByteStream:
    """Byte-level BPE. Python and the tokenizer replace the same maximal invalid subsequences."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return "" if token in self._hidden else self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Chain:
    """A decoder chain in the order in which it applies: per token, then byte runs, then the joined text."""

    def __init__(self) -> None:
        self.before: list[tuple[str, str]] = []  # Replacements in the token.
        self.byte_fallback = False
        self.after: list[tuple[str, str]] = []  # Replacements in the text.
        self.strip = ("", 0)  # A character, and how many of it are removed from the beginning of the text.
        self.metaspace: str | None = None
        self.drops_first = False  # Metaspace: the first token loses its markers.

    @classmethod
    def parse(cls, links: list[dict[str, Any]]) -> _Chain | None:
        """Return the chain, or None if it has a link whose effect is not local."""
        chain, fused = cls(), False
        for link in links:
            kind = link["type"]
            if kind == "Replace" and isinstance(link["pattern"], dict) and "String" in link["pattern"]:
                pattern = link["pattern"]["String"]
                if len(pattern) != 1:
                    return None  # It could span tokens or what an earlier replacement made.
                (chain.after if chain.byte_fallback else chain.before).append((pattern, link["content"]))
            elif kind == "ByteFallback" and not fused and not chain.byte_fallback:
                chain.byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and link["stop"] == 0 and not chain.strip[1]:
                chain.strip = (link["content"], link["start"])
            elif kind == "Metaspace" and len(links) == 1:
                chain.metaspace = link["replacement"]
                chain.drops_first = link.get("prepend_scheme", "always") != "never"
            else:
                return None
        joined_without_spaces = fused or chain.metaspace is not None or chain.byte_fallback or bool(chain.before)
        return chain if links and joined_without_spaces else None


class _PieceStream:
    """Sentencepiece-like vocabularies: ``▁`` is a space, ``<0xE4>`` one byte."""

    def __init__(self, piece: Callable[[int], str | None], hidden: frozenset[int], chain: _Chain) -> None:
        self._piece = piece
        self._hidden = hidden
        self._chain = chain
        self._run = bytearray()
        self._strip_left = chain.strip[1]
        self._is_first = True

    def feed(self, token: int) -> str:
        piece = self._piece(token)
        if piece is None or token in self._hidden:
            return ""
        for pattern, content in self._chain.before:
            piece = piece.replace(pattern, content)
        if self._chain.byte_fallback:
            value = _fallback_byte(piece)
            if value is not None:
                self._run.append(value)
                return ""
        if self._chain.metaspace is not None:
            drop = self._is_first and self._chain.drops_first
            piece = piece.replace(self._chain.metaspace, "" if drop else " ")
        self._is_first = False
        return self._show(self._end_run() + piece)

    def finish(self) -> str:
        return self._show(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _show(self, text: str) -> str:
        for pattern, content in self._chain.after:
            text = text.replace(pattern, content)
        while self._strip_left and text:
            if text[0] != self._chain.strip[0]:
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class _WindowStream:
    """Any other decoder: decode the tokens since the last complete text, with that text's tokens before them."""

    def __init__(
        self, decode: Callable[[list[int]], str], is_within_run: Callable[[int], bool], hidden: frozenset[int]
    ) -> None:
        self._decode = decode
        self._is_within_run = is_within_run
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # Leading tokens of the window that have been shown.
        self._shown = ""  # Their text.

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._window.append(token)
        if self._is_within_run(token):
            return ""
        text = self._decode(self._window)
        pending = len(self._window) - self._context
        if (text.endswith(REPLACEMENT) and pending < PENDING_TOKENS) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._shown) :] if self._window else ""


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [link for part in decoder["decoders"] for link in _flatten(part)]
    return [decoder]


def _fallback_byte(piece: str) -> int | None:
    """Return the byte of a piece such as ``<0xE4>``."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
