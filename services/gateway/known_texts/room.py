"""Bound on the new text that is tokenised within one turn of the event loop."""

from __future__ import annotations


class TooMuchNewText(Exception):
    """More text is new than may be tokenised here: the same call belongs in a thread, without a bound."""


class Room:
    """Characters that may still be tokenised. Text whose tokens are known takes no room."""

    def __init__(self, characters: int) -> None:
        """Begin with room for so many characters."""
        self._characters = characters

    def take(self, characters: int) -> None:
        """Take room for text that is about to be tokenised. Raises TooMuchNewText where there is not enough."""
        self._characters -= characters
        if self._characters < 0:
            raise TooMuchNewText
