"""Search for markers in a text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Return position and marker of the first occurrence, or None; of several at one position, the longest."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def withheld(text: str, markers: Iterable[str]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a marker."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, marker: str) -> int:
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
