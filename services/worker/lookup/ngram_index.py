"""Where the last tokens of a text have occurred before, and so how it may go on (prompt lookup decoding).

For each length of n-gram there is a table of slots, and each holds where the text goes on behind the latest n-gram
that falls into it. What is found is compared with the tokens themselves, so two n-grams that share a slot cost a
proposal and never make a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LENGTHS = (4, 3, 2)
"""Of n-grams, in tokens; the longest that has occurred before counts."""

LEAST_SLOT_BITS, MOST_SLOT_BITS = 10, 17
"""Of a table: 4 KiB to 512 KiB. Beyond 2**17 n-grams later ones displace earlier ones."""

_BASE, _MIX, _MASK = 0x9E3779B1, 0x9E3779B97F4A7C15, 2**64 - 1
"""An n-gram is a polynomial of its tokens modulo 2**64, which Fibonacci hashing takes to a slot (Knuth, 6.4)."""


class NgramIndex:
    """Of one text that grows at its end. A token costs one slot in each table, whatever the text's length."""

    def __init__(self, tokens: Sequence[int], expected: int) -> None:
        """``tokens`` is the text, which the caller appends to; ``expected`` is how many it may come to."""
        self._tokens = tokens
        self._bits = min(max(LEAST_SLOT_BITS, (4 * expected - 1).bit_length()), MOST_SLOT_BITS)
        self._tables = {length: np.zeros(1 << self._bits, dtype=np.int32) for length in LENGTHS}  # 0: none.
        self._covered = 0  # All n-grams are in the tables behind which a token before this one follows.

    def continuation(self, most: int) -> tuple[int, ...]:
        """``most`` tokens, at least one, that followed when the text's last tokens occurred before; none where they did
        not. A continuation that reaches the end of the text is a loop, which goes on as it began.
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
        """Take in what has been appended since the last call."""
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
        """As token by token: of several n-grams in one slot the last stays."""
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
