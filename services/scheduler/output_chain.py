"""A running digest of what a fold says, by which schedulers notice that their folds differ.

Theory of operation. The digest behind input n is made of the one before and the encoded outputs of input n, so it is
a function of the stream alone, as the outputs are. A snapshot carries the digest that it was taken at, and a fold that
begins at a snapshot goes on from there: every fold has the same digest behind the same input, wherever it began.
The holder of the lead says its digest with each renewal; a standby compares its own behind the same input
(:mod:`services.scheduler.divergence`).
"""

from __future__ import annotations

from collections import deque

import msgspec
import xxhash

MOST_MARKS = 8192
"""Digests that are remembered, of the last inputs that led to anything: what is said between two renewals at 40,000 a
second. A standby that is further ahead than that compares nothing."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The digest (xxh3_64, chained) of all outputs up to input ``seq``; input 0 says that none is known."""

    seq: int = 0
    digest: int = 0


class OutputChain:
    """The digest of one fold, and what it was behind recent inputs."""

    def __init__(self, begin: Mark) -> None:
        self._marks = deque([begin])  # Each holds up to the next one.
        self._reached = begin.seq

    @property
    def latest(self) -> Mark:
        """Behind the last input."""
        return Mark(self._reached, self._marks[-1].digest)

    def add(self, seq: int, bodies: list[bytes]) -> None:
        """Input ``seq`` led to these encoded outputs."""
        self._reached = seq
        if not bodies:
            return
        digest = self._marks[-1].digest
        for body in bodies:
            digest = xxhash.xxh3_64_intdigest(body, digest)
        self._marks.append(Mark(seq, digest))
        if len(self._marks) > MOST_MARKS:
            self._marks.popleft()

    def has_passed(self, seq: int) -> bool:
        """Whether input ``seq`` was folded."""
        return self._reached >= seq

    def digest_at(self, seq: int) -> int | None:
        """Return the digest behind input ``seq``, which was folded; None for one that is too far back."""
        for mark in reversed(self._marks):
            if mark.seq <= seq:
                return mark.digest
        return None
