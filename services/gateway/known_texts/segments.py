"""Cut a text into segments at boundaries that the text alone decides, each found from the cut before it. Pure.

So a text that goes on has the same segments as before, but for the last; and one in which something was changed has the
same again from the first cut that both have in common: most often the next message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.known_texts.boundaries import Boundaries

WINDOW_CHARACTERS = 16_384
"""So much of a text is searched for a boundary at once: other threads wait for two milliseconds at most."""

MOST_TRIES = 16
"""Where so many characters of a window begin no added token though they might, the window is searched for a whole one.
"""

MOST_SEARCHED = 262_144
"""Where so many characters have no boundary, the rest of the text is not searched."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Parts of a text that are tokenised one by one, as ``(start, end)``; ``tail`` is the last, which may be empty.

    Its tokens are those of all parts, one behind the other. The tail has no boundary at its end.
    """

    closed: list[tuple[int, int]]
    tail: tuple[int, int]


def segments(text: str, boundaries: Boundaries, cut_at: int = 0, start: int = 0) -> Segments:
    """Cut ``text`` behind ``cut_at``, where it is cut already and the next segment begins at ``start``."""
    closed: list[tuple[int, int]] = []
    while (found := _next_cut(text, boundaries, cut_at)) is not None:
        closed.append((start, found[0]))
        cut_at = found[0]
        start = cut_at + found[1]
    return Segments(closed, (start, len(text)))


def _next_cut(text: str, boundaries: Boundaries, start: int) -> tuple[int, int] | None:
    """Return the next boundary behind ``start``, and how many characters behind it are left out."""
    others = boundaries.others
    usual = start + boundaries.usual_characters
    token = _next_token(text, boundaries, start + boundaries.least_characters, usual, usual)
    if token >= 0:
        return token, 0
    for window in range(usual, min(len(text), usual + MOST_SEARCHED), WINDOW_CHARACTERS):
        end = window + WINDOW_CHARACTERS
        # What a window's end cuts through is found in none of both windows, which costs nothing but that boundary.
        behind = others.search(text, window - 1, end) if others is not None else None
        token = _next_token(text, boundaries, window, end if behind is None else behind.end(), end)
        if token >= 0:
            return token, 0
        if behind is not None:
            return behind.end(), boundaries.left_out
    return None


def _next_token(text: str, boundaries: Boundaries, start: int, before: int, end: int) -> int:
    """Where the first added token begins within [start, before) that ends by ``end``; -1 for none."""
    tokens = boundaries.tokens
    if tokens is None:
        return -1
    if not boundaries.openings:
        return _start(tokens.search(text, start, end), before)
    found, nearest = -1, before
    for opening in boundaries.openings:
        # Looking for one character is many times faster than looking for what a pattern may begin with.
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
