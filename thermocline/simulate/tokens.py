"""Token ids of simulated prompts. A span is named by a number: equal names give equal tokens, others differ.

A span's tokens are an arithmetic progression modulo 2**31 whose start and stride are hashes of its name, so any
length of it is a prefix of any greater length, and only the name has to be kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from services.scheduler.core.cache.digests import mix

_MASK_31 = 2**31 - 1
# Shorter spans are mostly used once and quickly made; longer ones would evict all others.
_LEAST_CACHED_TOKENS, _MOST_CACHED_TOKENS = 256, 65_536


class Span(NamedTuple):
    """The first ``tokens`` tokens of the span called ``name``."""

    name: int
    tokens: int


def span_tokens(span: Span) -> bytes:
    """Return the span's token ids in [0, 2**31), packed little-endian int32."""
    mixed = mix(span.name)
    start, stride = mixed & _MASK_31, (mixed >> 33) | 1
    ids = (np.arange(span.tokens, dtype=np.int64) * stride + start) & _MASK_31
    return ids.astype("<i4").tobytes()


class TokenMaker:
    """Makes prompts, with a bounded LRU cache of spans."""

    def __init__(self, cache_bytes: int = 8 * 2**20) -> None:
        """Bound the cached spans to ``cache_bytes`` bytes of packed tokens; 0 caches none."""
        self._bound = cache_bytes
        self._held = 0
        self._cache: OrderedDict[Span, bytes] = OrderedDict()

    def prompt(self, spans: Iterable[Span]) -> bytes:
        """Return the concatenated tokens of the spans, packed little-endian int32."""
        return b"".join([self._span(span) for span in spans])

    def _span(self, span: Span) -> bytes:
        known = self._cache.get(span)
        if known is not None:
            self._cache.move_to_end(span)
            return known
        made = span_tokens(span)
        if _LEAST_CACHED_TOKENS <= span.tokens <= _MOST_CACHED_TOKENS:
            self._cache[span] = made
            self._held += len(made)
            while self._held > self._bound:
                _, dropped = self._cache.popitem(last=False)
                self._held -= len(dropped)
        return made
