"""When an answer ends: stop tokens, stop strings, token limits. Pure.

``min_tokens`` holds back every kind of stop alike: a token at an output position below it neither stops the
answer by its id nor has its text examined for stop strings. Only the end of a grammar comes before it: an
end-of-text token below ``min_tokens`` is chosen only where the grammar allows nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.messages.requests import SamplingParams


@dataclass(frozen=True, slots=True)
class StopByToken:
    """The token itself ends the answer. ``match`` is None for the model's own end-of-text token."""

    match: int | None


def stop_by_token(
    params: SamplingParams, eos_token_ids: Collection[int], token: int, position: int
) -> StopByToken | None:
    """Return the stop if ``token`` at output ``position`` (from 0) ends the answer, else None."""
    is_end = token in eos_token_ids and not params.ignore_eos
    if position < params.min_tokens and not (is_end and params.grammar is not None):
        return None
    if is_end:
        return StopByToken(None)
    if token in params.stop_token_ids:
        return StopByToken(token)
    return None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The match that completes first wins, the longest of those that complete together; so the result does not
    depend on how the text was cut into pieces. Text that may be the beginning of a stop string is withheld.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Look for ``stops``, but not for empty ones; with ``include_stop`` the stop string itself is shown, too."""
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Add text; return the part that may be shown now. After a match ``matched`` is set and no more is shown."""
        if not self._stops:
            return piece
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include_stop else text[:start]
        keep = self._suspicious_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def skip(self, piece: str) -> str:
        """Add text that is not to be examined (below ``min_tokens``); a match never spans its end."""
        shown, self._held = self._held + piece, ""
        return shown

    def flush(self) -> str:
        """Return the withheld text, at the end of an answer that no stop string ended."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop): first to complete, then longest
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _suspicious_suffix(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
