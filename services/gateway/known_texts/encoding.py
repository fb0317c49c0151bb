"""Encoding of a text whose known segments are not computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.known_texts import measures
from services.gateway.known_texts.boundaries import Boundaries
from services.gateway.known_texts.index import KnownTexts
from services.gateway.known_texts.segments import segments
from shared.packed_tokens import TOKEN_BYTES, PackedTokens

EncodeAll = Callable[[Sequence[str]], list[PackedTokens]]
"""A function that returns the tokens of each text, without special tokens around them."""


def encode_known(
    text: str, namespace: str, boundaries: Boundaries, index: KnownTexts, encode: EncodeAll
) -> PackedTokens:
    """Return the tokens of ``text`` that ``encode`` would return; it is called once, for all unknown segments."""
    known = index.fronts.find(namespace, text, boundaries.ahead_characters)
    cut = segments(text, boundaries, known.end, known.start)
    if not cut.closed and not known.segments:
        (whole,) = encode([text])
        return whole
    texts = [text[start:end] for start, end in cut.closed]
    digests = index.digests(namespace, texts)
    parts = index.recall(digests)
    unknown = [place for place, tokens in enumerate(parts) if tokens is None]
    start, end = cut.tail
    tail = [text[start:end]] if start < end else []
    made = encode([*(texts[place] for place in unknown), *tail]) if unknown or tail else []
    for place, tokens in zip(unknown, made, strict=False):
        parts[place] = tokens.packed
    if unknown:
        index.remember([(digests[place], made[number].packed) for number, place in enumerate(unknown)])
        measures.MISSES.inc(len(unknown))
    closed = [part for part in parts if part is not None]
    index.fronts.keep(namespace, text, known, cut, closed)
    packed = b"".join([known.tokens, *closed, *(tokens.packed for tokens in made[len(unknown) :])])
    found = known.segments + len(parts) - len(unknown)
    if found:
        measures.HITS.inc(found)
        measures.TOKENS.inc(len(packed) // TOKEN_BYTES - sum(map(len, made)))
    return PackedTokens(packed)
