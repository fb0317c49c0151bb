"""Classes of characters in the patterns by which tokenizers split texts, and which kinds of characters they hold. Pure.

A *kind* is one character, or :data:`LETTERS` for a whole list of letters beyond ASCII. The list has only letters that
were letters in Unicode 3.2 and are today, so in every version that a tokenizer's library may follow, and that NFC
leaves unchanged, whatever stands before them.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

LETTERS = "letters"
"""The kind of all characters in :data:`LETTER_RANGES`."""

LETTER_RANGES = (
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u021f"  # Latin.
    "\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u048c-\u04c4"  # Greek, Cyrillic.
    "\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"  # Hebrew, Arabic.
    "\u0905-\u0939\u0e01-\u0e30"  # Devanagari, Thai.
    "\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"  # Kana, ideographs, Hangul.
)
"""Ranges, as the inside of a character class of Python's ``re``."""

_CATEGORIES = frozenset(
    name
    for letters in ("Lultmo", "Mnce", "Ndlo", "Pcdseifo", "Smcko", "Zslp", "Ccf")
    for name in (letters[0], *(letters[0] + letter for letter in letters[1:]))
)


def kind_of(character: str) -> str:
    """Return the kind of a character; any character beyond ASCII counts as a letter, to be on the safe side."""
    return character if character.isascii() else LETTERS


class UnprovablePattern(ValueError):
    """The pattern has a part for which no proof is known."""


@dataclass(frozen=True, slots=True)
class Item:
    r"""One part of a class: characters of a category (``\p{L}``, ``\s``, ...), or else from ``first`` to ``last``."""

    category: str = ""
    is_inverted: bool = False
    first: str = ""
    last: str = ""

    def holds(self, kind: str, *, ignores_case: bool) -> tuple[bool, bool]:
        """Return (whether it may hold some character of a kind, whether it must hold all of them)."""
        some, every = self._holds_letters(ignores_case) if kind == LETTERS else self._holds_one(kind, ignores_case)
        return (not every, not some) if self.is_inverted else (some, every)

    def _holds_letters(self, ignores_case: bool) -> tuple[bool, bool]:
        if not self.category:
            return self.last >= "\x80" or ignores_case, False
        return self.category[0] in "Lw", self.category in ("L", "w")

    def _holds_one(self, character: str, ignores_case: bool) -> tuple[bool, bool]:
        if self.category == "s":
            found = character.isspace()
        elif self.category == "w":
            found = character.isalnum() or character == "_"
        elif self.category:
            found = unicodedata.category(character).startswith(self.category)
        else:
            forms = {character, character.swapcase()} if ignores_case else {character}
            found = any(self.first <= form <= self.last for form in forms)
        return found, found


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """The set of characters that one place of a pattern matches."""

    items: tuple[Item, ...]
    is_negated: bool = False
    ignores_case: bool = False

    def may_hold(self, kind: str) -> bool:
        """Return False only if no character of the kind is in the class."""
        held = [item.holds(kind, ignores_case=self.ignores_case) for item in self.items]
        return not any(every for _, every in held) if self.is_negated else any(some for some, _ in held)

    def must_hold(self, kind: str) -> bool:
        """Return True only if all characters of the kind are in the class."""
        held = [item.holds(kind, ignores_case=self.ignores_case) for item in self.items]
        return not any(some for some, _ in held) if self.is_negated else any(every for _, every in held)


def category_item(name: str, *, is_inverted: bool) -> Item:
    r"""Return the item of ``\p{name}``. Raises UnprovablePattern for anything but a general category of Unicode."""
    if name not in _CATEGORIES:
        raise UnprovablePattern(f"\\p{{{name}}} is no general category")
    return Item(category=name, is_inverted=is_inverted)


def character_item(first: str, last: str = "") -> Item:
    """Return the item of one character, or of a range. Raises UnprovablePattern for an empty range."""
    if last and last < first:
        raise UnprovablePattern(f"the range {first}-{last} is empty")
    return Item(first=first, last=last or first)
