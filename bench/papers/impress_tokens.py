"""Which tokens of a simulated prefix matter to a request: drawn, because the papers publish no attention.

A token's importance is the product of what its passage is worth, what it is worth itself, and what both are worth to
this request; all are log-normal. The deviations are assumptions. With them chunks of 64 tokens are of mixed importance,
as in IMPRESS's Figure 5 (a), and passages differ between requests, as in its section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PASSAGE_TOKENS = 32

Sets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spreads:
    """Deviations of logarithms: of passages and tokens for everybody, and for one request."""

    passage: float = 1.0
    token: float = 0.7
    asked_passage: float = 0.7
    asked_token: float = 0.4
    head: float = 0.5
    """Between heads of a layer."""


CLUSTERED = Spreads()
SCATTERED = Spreads(passage=0.3, token=1.0, asked_passage=0.3, asked_token=0.7)
"""Importance that hardly depends on the passage, which is the worst case for chunks."""


class PrefixTokens:
    """One prefix in one layer. ``order`` is what the paper's reordering makes of it: by importance to everybody."""

    def __init__(self, tokens: int, spreads: Spreads, rng: np.random.Generator) -> None:
        self.tokens = tokens
        self._spreads = spreads
        self._passages = -(-tokens // PASSAGE_TOKENS)
        self._base = self._drawn(rng, spreads.passage, spreads.token)
        self.order: Sets = np.argsort(-self._base, kind="stable")

    def chosen(self, ratio: float, rng: np.random.Generator, heads: int = 1) -> Sets:
        """Tokens that one request finds important; with several heads, what any of them does."""
        count = max(1, round(ratio * self.tokens))
        asked = self._base + self._drawn(rng, self._spreads.asked_passage, self._spreads.asked_token)
        if heads == 1:
            return _largest(asked, count)
        sets = [
            _largest(asked + rng.normal(0.0, self._spreads.head, self.tokens).astype(np.float32), count)
            for _ in range(heads)
        ]
        return np.unique(np.concatenate(sets))

    def _drawn(self, rng: np.random.Generator, passage: float, token: float) -> NDArray[np.float32]:
        """Logarithms of importance, float32 ``[tokens]``."""
        passages = rng.normal(0.0, passage, self._passages).repeat(PASSAGE_TOKENS)[: self.tokens]
        return (passages + rng.normal(0.0, token, self.tokens)).astype(np.float32)


def in_chunks(chosen: Sets, tokens: int, chunk_tokens: int, order: Sets | None = None) -> NDArray[np.float64]:
    """The important share of each chunk, float64 ``[chunks]``; ``order`` says which token lies where."""
    at = chosen
    if order is not None:
        place = np.empty(tokens, dtype=np.int64)
        place[order] = np.arange(tokens)
        at = place[chosen]
    counts = np.bincount(at // chunk_tokens, minlength=-(-tokens // chunk_tokens))
    return counts / chunk_tokens


def _largest(values: NDArray[np.float32], count: int) -> Sets:
    return np.argpartition(-values, count - 1)[:count].astype(np.int64)
