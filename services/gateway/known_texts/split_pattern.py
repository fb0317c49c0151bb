"""Prove that a pattern splits a text between two characters, whatever else the text holds. Pure.

Pre-tokenizers find matches of a pattern one behind the other. A pattern that joins no *a* to a *b* behind it matches
both in no single match; so all attempts that begin before a place between both end there, or fail there, as they would
if the text ended, unless an assertion looks ahead. No attempt that begins at *b* sees the text before it. So the
matches of the two parts are those of the whole.

The supported language is that of published tokenizers: alternatives of classes with quantifiers, and one assertion at
an alternative's end. For each alternative the places that may match its first and last character are computed, and for
all which may follow which (Glushkov, The abstract theory of automata, 1961). Quantifiers are read as ``*`` or ``?``, so
that more characters count as joined than are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.gateway.known_texts.character_classes import (
    CharacterClass,
    Item,
    UnprovablePattern,
    category_item,
    character_item,
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a ByteLevel pre-tokenizer that splits."""

_QUANTIFIER = re.compile(r"[?*+]|\{(\d*)(?:,(\d*))?\}")
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}
_SHORTHANDS = {"s": "s", "d": "Nd", "w": "w"}


@dataclass(frozen=True, slots=True)
class _Fragment:
    """A part of an alternative: whether it may match nothing, and the places of its first and last characters."""

    may_be_empty: bool
    first: frozenset[int]
    last: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Alternative:
    fragment: _Fragment
    ahead: CharacterClass | None
    is_certain: bool  # It matches each text that its places allow: no quantifier requires more than one.


class SplitPattern:
    """One pattern of a pre-tokenizer."""

    def __init__(self, pattern: str) -> None:
        """Parse ``pattern``.

        Raises UnprovablePattern for syntax that is not supported here, and for an alternative that may match nothing.
        """
        parser = _Parser(pattern)
        self._alternatives = parser.alternatives()
        self._classes = parser.classes
        self._follow = parser.follow
        if any(each.fragment.may_be_empty for each in self._alternatives):
            raise UnprovablePattern("an alternative may match nothing")

    def never_joins(self, before: str, behind: str) -> bool:
        """Return whether the matches of a text that is cut in two are those of its two parts.

        The cut is between characters of the kinds ``before`` and ``behind``.
        """
        classes = self._classes
        if any(classes[one].may_hold(before) and classes[two].may_hold(behind) for one, two in self._follow):
            return False
        return all(
            each.ahead is None
            or not each.ahead.may_hold(behind)
            or not any(classes[place].may_hold(before) for place in each.fragment.last)
            for each in self._alternatives
        )

    def never_skips(self, kind: str) -> bool:
        """Return whether each character of a kind is in some match.

        It is if one alternative matches it alone, unconditionally.
        """
        return any(
            self._classes[place].must_hold(kind)
            for each in self._alternatives
            if each.ahead is None and each.is_certain
            for place in each.fragment.first & each.fragment.last
        )


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._ignores_case = False
        self._is_certain = True
        self._ahead: CharacterClass | None = None
        self.classes: list[CharacterClass] = []
        self.follow: set[tuple[int, int]] = set()

    def alternatives(self) -> list[_Alternative]:
        found = []
        while True:
            self._is_certain, self._ahead = True, None
            fragment = self._sequence(is_outermost=True)
            found.append(_Alternative(fragment, self._ahead, self._is_certain))
            if self._at == len(self._text):
                return found
            self._expect("|")

    def _sequence(self, *, is_outermost: bool = False) -> _Fragment:
        whole = _Fragment(True, frozenset(), frozenset())
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._text.startswith(("(?!", "(?="), self._at):
                self._assertion(is_outermost)
                break
            whole = self._joined(whole, self._quantified(self._atom()))
        return whole

    def _assertion(self, is_outermost: bool) -> None:
        """Read an assertion at the end of an alternative: one class that must, or must not, come next."""
        self._at += 3
        self._ahead = self._class()
        self._expect(")")
        if not is_outermost or (self._at < len(self._text) and self._text[self._at] != "|"):
            raise UnprovablePattern("an assertion stands within an alternative")

    def _joined(self, one: _Fragment, two: _Fragment) -> _Fragment:
        self.follow |= {(last, first) for last in one.last for first in two.first}
        return _Fragment(
            one.may_be_empty and two.may_be_empty,
            one.first | two.first if one.may_be_empty else one.first,
            one.last | two.last if two.may_be_empty else two.last,
        )

    def _quantified(self, fragment: _Fragment) -> _Fragment:
        count = 0
        while (told := _QUANTIFIER.match(self._text, self._at)) is not None:
            self._at = told.end()
            least = int(told[1] or 0) if told[0].startswith("{") else int(told[0] == "+")
            # A second + is possessive: it does not backtrack.
            self._is_certain &= least < 2 and not (count and told[0] == "+")
            if told[0] != "?":
                self.follow |= {(last, first) for last in fragment.last for first in fragment.first}
            if not least:
                fragment = _Fragment(True, fragment.first, fragment.last)
            count += 1
        return fragment

    def _atom(self) -> _Fragment:
        if not self._text.startswith("(", self._at):
            self.classes.append(self._class())
            place = frozenset({len(self.classes) - 1})
            return _Fragment(False, place, place)
        outer = self._ignores_case
        opening = next((each for each in ("(?i:", "(?:", "(") if self._text.startswith(each, self._at)), "")
        if opening == "(" and self._text.startswith("(?", self._at):
            raise UnprovablePattern(f"what {self._text[self._at : self._at + 4]!r} opens is not understood")
        self._at += len(opening)
        self._ignores_case = outer or opening == "(?i:"
        whole = self._sequence()
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            other = self._sequence()
            whole = _Fragment(
                whole.may_be_empty or other.may_be_empty, whole.first | other.first, whole.last | other.last
            )
        self._expect(")")
        self._ignores_case = outer
        return whole

    def _class(self) -> CharacterClass:
        if self._text.startswith("[", self._at):
            return self._bracketed()
        character = self._next()
        if character in ".^$()[]{}?*+|":
            raise UnprovablePattern(f"{character!r} is not understood here")
        item = self._escaped() if character == "\\" else character_item(character)
        return CharacterClass((item,), ignores_case=self._ignores_case)

    def _bracketed(self) -> CharacterClass:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        items: list[Item] = []
        while not self._text.startswith("]", self._at):
            if self._text.startswith(("[", "&&"), self._at):
                raise UnprovablePattern("a class within a class is not understood")
            character = self._next()
            item = self._escaped() if character == "\\" else character_item(character)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                item = self._range(item)
            items.append(item)
        self._at += 1
        if not items:
            raise UnprovablePattern("a class is empty")
        return CharacterClass(tuple(items), is_negated, self._ignores_case)

    def _range(self, first: Item) -> Item:
        self._at += 1
        character = self._next()
        last = self._escaped() if character == "\\" else character_item(character)
        if first.category or last.category or character == "[":
            raise UnprovablePattern("a range has an end that is no character")
        return character_item(first.first, last.first)

    def _escaped(self) -> Item:
        """Read what follows a backslash."""
        name = self._next()
        if name in "pP":
            self._expect("{")
            end = self._text.find("}", self._at)
            if end < 0:
                raise UnprovablePattern("a property's name has no end")
            told, self._at = self._text[self._at : end], end + 1
            return category_item(told, is_inverted=name == "P")
        if name.lower() in _SHORTHANDS:
            return Item(category=_SHORTHANDS[name.lower()], is_inverted=name.isupper())
        if name in _CONTROLS:
            return character_item(_CONTROLS[name])
        if name.isalnum() or not name.isascii():
            raise UnprovablePattern(f"\\{name} is not understood")
        return character_item(name)

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnprovablePattern("the pattern breaks off")
        self._at += 1
        return self._text[self._at - 1]

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise UnprovablePattern(f"{text!r} is missing at {self._at}")
        self._at += len(text)
