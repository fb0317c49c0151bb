"""Segmentation of a text at boundaries that the text alone decides, each found from the cut before it. Pure.

So a text that continues another has the same segments, except the last; and a text that was changed in one place has
the same segments again from the first common cut: usually the next message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.known_texts.boundaries import Boundaries

WINDOW_CHARACTERS = 16_384
"""Characters searched for a boundary at a time: other threads wait for two milliseconds at most."""

MOST_TRIES = 16
"""After so many candidate first characters that begin no added token, the window is searched by the whole pattern."""

MOST_SEARCHED = 262_144
"""After so many characters without a boundary, the rest of the text is not searched."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Parts of a text that are tokenised separately, as ``(start, end)``; ``tail`` is the last one, which may be empty.

    The text's tokens are those of all parts in order. The tail has no boundary at its end.
    """

    closed: list[tuple[int, int]]
    tail: tuple[int, int]


def segments(text: str, boundaries: Boundaries, cut_at: int = 0, start: int = 0) -> Segments:
    """Cut ``text`` behind ``cut_at``, an earlier cut behind which the next segment begins at ``start``."""
    closed: list[tuple[int, int]] = []
    while (found := _next_cut(text, boundaries, cut_at)) is not None:
        closed.append((start, found[0]))
        cut_at = found[0]
        start = cut_at + found[1]
    return Segments(closed, (start, len(text)))


def _next_cut(text: str, boundaries: Boundaries, start: int) -> tuple[int, int] | None:
    """Return the next boundary behind ``start``, and the number of characters left out behind it, or None."""
    others = boundaries.others
    usual = start + boundaries.usual_characters
    token = _next_token(text, boundaries, start + boundaries.least_characters, usual, usual)
    if token >= 0:
        return token, 0
    for window in range(usual, min(len(text), usual + MOST_SEARCHED), WINDOW_CHARACTERS):
        end = window + WINDOW_CHARACTERS
        # A match across the end of a window is found in neither window, which only loses that boundary.
        behind = others.search(text, window - 1, end) if others is not None else None
        token = _next_token(text, boundaries, window, end if behind is None else behind.end(), end)
        if token >= 0:
            return token, 0
        if behind is not None:
            return behind.end(), boundaries.left_out
    return None


def _next_token(text: str, boundaries: Boundaries, start: int, before: int, end: int) -> int:
    """Return where the first added token begins within [start, before) that ends by ``end``; -1 for none."""
    tokens = boundaries.tokens
    if tokens is None:
        return -1
    if not boundaries.openings:
        return _start(tokens.search(text, start, end), before)
    found, nearest = -1, before
    for opening in boundaries.openings:
        # Searching one character is many times faster than searching a pattern.
        place, tries = text.find(opening, start, nearest), 0
        while place >= 0 and tokens.match(text, place, end) is None:
            tries += 1
            if tries > MOST_TRIES:
                return _start(tokens.search(text, start, end), before)
            place = text.find(opening, place + 1, nearest)
        if place >= 0:
            found = nearest = place
    return found


def _start(found: re.Match[str] | None, before: int) -> int:
    return found.start() if found is not None and found.start() < before else -1
