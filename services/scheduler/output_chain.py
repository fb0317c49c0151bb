"""A running digest of a fold's outputs, by which schedulers notice that their folds differ.

Theory of operation. The digest behind input n is made of the one before and the encoded outputs of input n, so it is a
function of the stream alone, as the outputs are. A snapshot carries the digest that it was taken at, and a fold that
begins at a snapshot goes on from there: every fold has the same digest behind the same input, wherever it began.

The holder of the lead says its digest with each renewal; a standby compares its own behind the same input
(:mod:`services.scheduler.divergence`).
"""

from __future__ import annotations

from collections import deque

import msgspec
import xxhash

MOST_MARKS = 8192
"""Digests that are remembered, of the last inputs with outputs: as many as come between two renewals at 40,000 a
second. A standby that is further ahead than that compares nothing."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The digest (xxh3_64, chained) of all outputs up to input ``seq``; input 0 says that none is known."""

    seq: int = 0
    digest: int = 0


class OutputChain:
    """The digest of one fold's outputs, and its values behind recent inputs."""

    def __init__(self, begin: Mark) -> None:
        """Continue from ``begin``, a snapshot's digest; ``Mark()`` begins at input 0."""
        self._marks = deque([begin])  # Each is valid up to the next one's input.
        self._reached = begin.seq

    @property
    def latest(self) -> Mark:
        """The digest behind the last input."""
        return Mark(self._reached, self._marks[-1].digest)

    def add(self, seq: int, bodies: list[bytes]) -> None:
        """Extend the digest by the encoded outputs of input ``seq``."""
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
        """Return whether input ``seq`` was folded."""
        return self._reached >= seq

    def digest_at(self, seq: int) -> int | None:
        """Return the digest behind input ``seq``, which was folded; None where it is too far back."""
        for mark in reversed(self._marks):
            if mark.seq <= seq:
                return mark.digest
        return None
