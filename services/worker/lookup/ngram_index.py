"""An index of earlier occurrences of a text's last tokens, for its likely continuation (prompt lookup decoding).

For each length of n-gram there is a table of slots, and each holds where the text goes on behind the latest n-gram that
falls into it. The text there is compared with the tokens themselves, so two n-grams that share a slot cost a proposal
and never make a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LENGTHS = (4, 3, 2)
"""Lengths of n-grams, in tokens; the longest that has occurred before counts."""

LEAST_SLOT_BITS, MOST_SLOT_BITS = 10, 17
"""Bounds for the slots of a table: 4 KiB to 512 KiB. Beyond 2**17 n-grams later ones displace earlier ones."""

_BASE, _MIX, _MASK = 0x9E3779B1, 0x9E3779B97F4A7C15, 2**64 - 1
"""An n-gram is a polynomial of its tokens modulo 2**64, which Fibonacci hashing takes to a slot (Knuth, 6.4)."""


class NgramIndex:
    """The index of one text that grows at its end. A token costs one slot in each table, whatever the text's length."""

    def __init__(self, tokens: Sequence[int], expected: int) -> None:
        """``tokens`` is the text, which the caller appends to; ``expected`` is its estimated final length."""
        self._tokens = tokens
        self._bits = min(max(LEAST_SLOT_BITS, (4 * expected - 1).bit_length()), MOST_SLOT_BITS)
        self._tables = {length: np.zeros(1 << self._bits, dtype=np.int32) for length in LENGTHS}  # 0: none.
        self._covered = 0  # The tables have all n-grams that are followed by a token before this one.

    def continuation(self, most: int) -> tuple[int, ...]:
        """Return ``most`` tokens, at least one, that followed an earlier occurrence of the text's last tokens.

        Return () where there is none. A continuation that reaches the end of the text repeats from its own start.
        """
        self._cover()
        end = len(self._tokens)
        last = self._tokens[max(0, end - LENGTHS[0]) : end]
        for length in LENGTHS:
            if len(last) < length:
                continue
            ngram = last[len(last) - length :]
            found = int(self._tables[length][self._slot(ngram)])
            if found and list(self._tokens[found - length : found]) == list(ngram):
                followed = self._tokens[found : found + most]
                return tuple(followed[place % len(followed)] for place in range(most))
        return ()

    def _slot(self, ngram: Sequence[int]) -> int:
        key = 0
        for token in ngram:
            key = key * _BASE + token
        return (key * _MIX & _MASK) >> (64 - self._bits)

    def _cover(self) -> None:
        """Add the tokens that were appended since the last call."""
        first, end = max(self._covered, 1), len(self._tokens)
        self._covered = end
        if end - first > LENGTHS[0]:
            self._cover_at_once(first, end)
            return
        for follower in range(first, end):
            before = self._tokens[max(0, follower - LENGTHS[0]) : follower]
            for length in LENGTHS:
                if len(before) >= length:
                    self._tables[length][self._slot(before[len(before) - length :])] = follower

    def _cover_at_once(self, first: int, end: int) -> None:
        """Add many tokens with the result of adding one by one: of several n-grams in one slot the last stays."""
        start = max(0, first - LENGTHS[0])
        tokens = np.array(self._tokens[start:end], dtype=np.uint64)
        for length in LENGTHS:
            begin = max(first, length)
            if begin >= end:
                continue
            keys = np.zeros(end - begin, dtype=np.uint64)
            for place in range(begin - length - start, begin - start):
                keys = keys * np.uint64(_BASE) + tokens[place : place + len(keys)]
            slots = (keys * np.uint64(_MIX)) >> np.uint64(64 - self._bits)
            np.maximum.at(self._tables[length], slots, np.arange(begin, end, dtype=np.int32))
