"""Cuts and tokens of recent long texts: a text with the same beginning is compared, and neither cut nor hashed.

A cut holds in another text, too, if both agree up to the cut and for the characters behind it that prove one
(``Boundaries.ahead_characters``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.known_texts.alike import LEAST_CHARACTERS, Entry, TextsAlike
from services.gateway.known_texts.segments import Segments
from shared.packed_tokens import TOKEN_BYTES

CUT_BYTES = 100
"""Approximate memory of a cut: three integers in lists."""


@dataclass(frozen=True, slots=True)
class Front:
    """A text up to its last cut.

    ``ends`` are its cuts and ``starts`` where the segments behind them begin, both in characters; ``counts`` are the
    numbers of tokens before each, and ``tokens`` all of them, packed.
    """

    ends: list[int]
    starts: list[int]
    counts: list[int]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """The known first segments of a text.

    ``segments`` is their number, ``tokens`` are their tokens (packed), ``end`` is the cut behind them, and ``start`` is
    where the next segment begins. ``entry`` is the earlier text that they are from.
    """

    end: int = 0
    start: int = 0
    segments: int = 0
    tokens: bytes | memoryview = b""
    entry: Entry[Front] | None = None


NOTHING = Known()


class Fronts:
    """Fronts of recent texts."""

    def __init__(
        self,
        most_bytes: int,
        observe: Callable[[int], None] = lambda nbytes: None,
        *,
        least_characters: int = LEAST_CHARACTERS,
    ) -> None:
        """Keep fronts in up to ``most_bytes``; all arguments are those of :class:`TextsAlike`.

        A text is kept only where it has at least ``least_characters`` of new text.
        """
        self.texts: TextsAlike[Front] = TextsAlike(most_bytes, observe, least_characters=least_characters)

    def find(self, namespace: str, text: str, ahead_characters: int) -> Known:
        """Return the longest front that ``text`` has in common with a text of the namespace.

        It ends at a cut that holds in ``text``. A cut depends on ``ahead_characters`` behind it.
        """
        found = self.texts.nearest(namespace, text)
        if found is None:
            return NOTHING
        entry, agreed = found
        front = entry.value
        count = bisect_right(front.ends, agreed - ahead_characters)
        if not count:
            return NOTHING
        last = count - 1
        tokens = memoryview(front.tokens)[: front.counts[last] * TOKEN_BYTES]
        return Known(front.ends[last], front.starts[last], count, tokens, entry)

    def keep(self, namespace: str, text: str, known: Known, cut: Segments, parts: Sequence[bytes]) -> None:
        """Keep a text: the ``known`` front, how the rest was ``cut``, and the tokens (packed) of those segments.

        A text with little new text is not kept: that would copy all of its tokens.
        """
        if not cut.closed or cut.closed[-1][1] - known.end < self.texts.least_characters:
            return
        before = known.entry
        front = Front([], [], [], b"") if before is None else before.value
        ends, starts, counts = (each[: known.segments] for each in (front.ends, front.starts, front.counts))
        starts += [start for start, _ in cut.closed[1:]] + [cut.tail[0]]
        for (_, end), tokens in zip(cut.closed, parts, strict=True):
            ends.append(end)
            counts.append((counts[-1] if counts else 0) + len(tokens) // TOKEN_BYTES)
        made = Front(ends, starts, counts, b"".join((known.tokens, *parts)))
        goes_on = before is not None and text.startswith(before.text[: front.ends[-1]])
        nbytes = len(made.tokens) + CUT_BYTES * len(ends)
        self.texts.put(namespace, text, made, nbytes, before if goes_on else None)
