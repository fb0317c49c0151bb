"""Where tokens added to a vocabulary cut a text, and where they forbid a cut. Pure.

A tokenizer searches for its added tokens first, the leftmost and longest first, and tokenises the text between them as
separate texts. So a text may be cut in front of such a token, if no earlier token reaches into it, and if it takes no
white space from before it.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from services.gateway.known_texts.character_classes import kind_of

MOST_OPENINGS = 4
"""Limit on the first characters of added tokens searched one by one: published tokenizers have one or two."""


class AddedTokens:
    """The added tokens of one tokenizer."""

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        """Take the list ``added_tokens`` of a ``tokenizer.json``; tokens without text are left out."""
        self._told = [each for each in told if each["content"]]
        self._joined = {pair for each in self._told for pair in _pairs(each["content"])}
        self._takes_space_behind = {kind_of(each["content"][-1]) for each in self._told if each["rstrip"]}
        self.begin = frozenset(kind_of(each["content"][0]) for each in self._told)
        """Kinds of characters that tokens begin with; ``end`` has those that they end with."""
        self.end = frozenset(kind_of(each["content"][-1]) for each in self._told)

    @property
    def longest(self) -> int:
        """Length of the longest added token, in characters; 0 where there are none."""
        return max((len(each["content"]) for each in self._told), default=0)

    @property
    def look_around(self) -> bool:
        """Whether some token matches only between characters outside of words: then nothing can be proven here."""
        return any(each["single_word"] for each in self._told)

    @property
    def has_normalized(self) -> bool:
        """Whether some tokens are searched in normalized text."""
        return any(each["normalized"] for each in self._told)

    def forbid(self, before: str, behind: str) -> bool:
        """Return whether a token may span the place between characters of these kinds."""
        return (before, behind) in self._joined or before in self._takes_space_behind

    def cuts(self) -> re.Pattern[str] | None:
        """Return a pattern of the tokens that every text may be cut before; None where there are none."""
        found = self._cut_texts()
        return re.compile("|".join(map(re.escape, found))) if found else None

    def cut_openings(self) -> str:
        """Return the first characters of those tokens; "" where there are more than :data:`MOST_OPENINGS`."""
        found = sorted({text[0] for text in self._cut_texts()})
        return "".join(found) if len(found) <= MOST_OPENINGS else ""

    def _cut_texts(self) -> list[str]:
        inner = {character for each in self._told for character in each["content"][1:]}
        takers = [each["content"] for each in self._told if each["lstrip"]]
        return sorted(
            each["content"]
            for each in self._told
            if not each["normalized"]
            and each["content"][0] not in inner
            and not each["content"][0].isspace()
            and not any(taker.startswith(each["content"]) for taker in takers)
        )


def _pairs(content: str) -> set[tuple[str, str]]:
    """Return the pairs (kind, character) that are adjacent in a token, or in its normal form."""
    forms = (content, unicodedata.normalize("NFC", content))
    return {(kind_of(one), two) for form in forms for one, two in itertools.pairwise(form)}
