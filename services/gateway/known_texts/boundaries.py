"""Where every text may be cut without a change to its tokens, proven from a tokenizer's definition. Pure.

A cut in front of an added token holds for every tokenizer (:mod:`services.gateway.known_texts.added_tokens`). Others
hold between a character and white space, or Chinese punctuation, where the steps of the tokenizer are known:

- a pre-tokenizer that always splits there, by a pattern (:mod:`services.gateway.known_texts.split_pattern`) or because
  it splits at white space; steps before it must not join the two, steps behind it see its pieces separately;
- or byte pair encoding without one, where no token of the vocabulary has a space behind such a character: no merge
  crosses the place, and merges on both sides do not wait for one another.

Nothing else counts as a proof. A normalizer that puts a space in front of a text puts it in front of each segment: then
the segment's own space is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.known_texts.added_tokens import AddedTokens
from services.gateway.known_texts.character_classes import LETTER_RANGES, LETTERS, UnprovablePattern, kind_of
from services.gateway.known_texts.split_pattern import GPT2, SplitPattern

BEFORE = (*map(chr, range(0x21, 0x7F)), LETTERS)
"""Kinds of characters that a cut may stand behind."""

WHITE = (" ", "\n")
BEHIND = (*WHITE, "\uff0c", "\u3002", "\u3001")
"""Characters that a cut may stand in front of. NFC composes none of them with what stands before it."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The proven boundaries of a tokenizer, and the lengths of segments.

    ``tokens`` finds added tokens to cut in front of, ``others`` a character to cut behind; None where there are none.
    Of a segment behind such a character the first ``left_out`` characters are not encoded. A segment is no shorter than
    ``least_characters``, since each costs a digest and a lookup. Up to ``usual_characters`` it ends only in front of an
    added token; beyond them, at any boundary. ``openings`` are the characters that tokens begin with, "" where these
    are many. A cut depends on at most ``ahead_characters`` behind it.
    """

    tokens: re.Pattern[str] | None = None
    others: re.Pattern[str] | None = None
    left_out: int = 0
    least_characters: int = 512
    usual_characters: int = 2_048
    openings: str = ""
    ahead_characters: int = 2


class _Unproven(Exception):
    """The tokenizer has an unknown part."""


class _Step(Protocol):
    """The properties of a pre-tokenizer that a proof needs."""

    def never_joins(self, before: str, behind: str) -> bool:
        """Return whether its pieces of a text are those of the two parts, or one piece holds the place between both."""

    def never_skips(self, kind: str) -> bool:
        """Return whether every character of the kind is in some piece, so that :meth:`never_joins` splits there."""


@dataclass(frozen=True, slots=True)
class _Neutral:
    """A step that does nothing between two characters if neither is one of ``concerned``."""

    concerned: frozenset[str] = frozenset()

    def never_joins(self, before: str, behind: str) -> bool:
        return before not in self.concerned and behind not in self.concerned

    def never_skips(self, kind: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _AtWhiteSpace:
    """A step that splits at each character that it counts as white space."""

    white: str

    def never_joins(self, before: str, behind: str) -> bool:
        return before not in self.white

    def never_skips(self, kind: str) -> bool:
        return kind in self.white


def prove(told: dict[str, Any]) -> Boundaries:
    """Return the boundaries of the tokenizer with this ``tokenizer.json``.

    They are those of added tokens if no others are proven.
    """
    added = AddedTokens(told["added_tokens"])
    model = told["model"]
    if added.look_around or model.get("dropout"):
        return Boundaries()
    try:
        return _Prover(told, added).boundaries()
    except (_Unproven, UnprovablePattern, RecursionError):
        return Boundaries(added.cuts(), openings=added.cut_openings(), ahead_characters=_ahead(added))


def links(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return a part of a tokenizer as the flat list of its steps."""
    if part is None:
        return []
    return [link for each in part[name] for link in links(each, name)] if part["type"] == "Sequence" else [part]


class _Prover:
    def __init__(self, told: dict[str, Any], added: AddedTokens) -> None:
        self._added = added
        self._model = told["model"]
        self._behind: tuple[str, ...] = BEHIND  # Narrowed by the steps.
        self._mark = ""  # The character that replaces a space from some step on.
        self._left_out = 0
        self._joined: frozenset[str] | None = None  # Kinds of characters that the vocabulary joins with a space.
        steps = links(told["pre_tokenizer"], "pretokenizers")
        self._normalized(links(told["normalizer"], "normalizers"), steps[0]["type"] if steps else "")
        self._steps = list(self._pre_tokenized(steps))

    def boundaries(self) -> Boundaries:
        """Return the proven boundaries. Raises _Unproven."""
        found: dict[str, list[str]] = {}
        for behind in self._behind:
            before = "".join(_as_range(kind) for kind in BEFORE if self._holds(kind, behind))
            if before:
                found.setdefault(before, []).append(behind)
        following = ""
        if self._left_out:
            # The space that is left out must be followed by the start of a piece, and no added token.
            starts = [kind for kind in BEFORE if kind not in self._added.begin]
            following = f"[{''.join(map(_as_range, starts))}]"
        options = [f"[{before}](?=[{''.join(behind)}]{following})" for before, behind in found.items()]
        others = re.compile("|".join(options)) if options else None
        return Boundaries(
            self._added.cuts(),
            others,
            self._left_out,
            openings=self._added.cut_openings(),
            ahead_characters=_ahead(self._added),
        )

    def _holds(self, before: str, behind: str) -> bool:
        if self._added.forbid(before, behind):
            return False
        if self._left_out and before in self._added.end:
            return False  # Behind a token, the text's own space is not the one that the normalizer adds.
        for step, mark in self._steps:
            seen = mark or behind
            if not step.never_joins(before, seen):
                return False
            if step.never_skips(before) or step.never_skips(seen):
                return True
        return self._merges_apart(before)

    def _normalized(self, steps: list[dict[str, Any]], first_step: str) -> None:
        kinds = [step["type"] for step in steps]
        if kinds in ([], ["NFC"]):
            return
        if self._added.has_normalized:
            raise _Unproven
        if kinds == ["BertNormalizer"]:
            # It puts spaces around ideographs and removes accents: only white space stays unchanged.
            if not first_step.startswith(("Whitespace", "BertPre")):
                raise _Unproven
            return
        if kinds == ["Prepend", "Replace"] and " " not in self._added.begin:
            self._left_out = 1
        elif kinds != ["Replace"]:
            raise _Unproven
        replaced = steps[-1]
        if replaced["pattern"] != {"String": " "} or (self._left_out and steps[0]["prepend"] != replaced["content"]):
            raise _Unproven
        self._take_mark(replaced["content"])

    def _take_mark(self, mark: str) -> None:
        if len(mark) != 1 or mark.isascii() or mark.isalnum():
            raise _Unproven
        self._behind, self._mark = (" ",), mark

    def _pre_tokenized(self, steps: list[dict[str, Any]]) -> Iterator[tuple[_Step, str]]:
        """Yield each step, and the character that stands for a space before it."""
        if steps and self._left_out:
            raise _Unproven
        for place, step in enumerate(steps):
            mark = self._mark
            match step["type"]:
                case "Split":
                    yield _split(step), mark
                case "Digits":
                    yield _Neutral(), mark  # No boundary stands in front of a digit.
                case "ByteLevel":
                    if step["add_prefix_space"]:
                        self._behind = (" ",)  # Nothing is put before a space.
                    if step["use_regex"]:
                        yield SplitPattern(GPT2), mark
                    if place + 1 < len(steps):
                        raise _Unproven  # Later steps see other characters.
                    self._joined = frozenset(BEFORE)  # The vocabulary has other characters, too.
                case "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer":
                    self._behind = tuple(each for each in self._behind if each in WHITE)
                    yield _AtWhiteSpace(" \n"), mark
                case "Metaspace":
                    self._take_mark(step["replacement"])
                    yield (_AtWhiteSpace(self._mark) if step.get("split", True) else _Neutral()), self._mark
                case _:
                    raise _Unproven

    def _merges_apart(self, before: str) -> bool:
        """Return whether no merge joins a space to such a character, in a text that no step splits."""
        if self._joined is None:
            self._joined = self._joined_with_spaces()
        return before not in self._joined

    def _joined_with_spaces(self) -> frozenset[str]:
        model, mark = self._model, self._mark
        affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
        if model["type"] != "BPE" or any(affixes) or model.get("ignore_merges") or mark not in model["vocab"]:
            return frozenset(BEFORE)
        found = set()
        for piece in model["vocab"]:
            place = piece.find(mark, 1)
            while place > 0:
                if piece[place - 1] != mark:
                    found.add(kind_of(piece[place - 1]))
                place = piece.find(mark, place + 1)
        # A character may appear as the unknown token, or as the token of its last byte.
        stand_ins = [model.get("unk_token"), "<0x00>" if model.get("byte_fallback") else None]
        return frozenset(BEFORE) if any(kind_of(each[-1]) in found for each in stand_ins if each) else frozenset(found)


def _ahead(added: AddedTokens) -> int:
    """Return how far a pattern of :meth:`_Prover.boundaries` looks ahead: a whole token, or two characters."""
    return max(2, added.longest)


def _split(step: dict[str, Any]) -> _Step:
    if "String" in step["pattern"]:
        return _Neutral(frozenset(map(kind_of, step["pattern"]["String"])))
    if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        raise _Unproven
    return SplitPattern(step["pattern"]["Regex"])


def _as_range(kind: str) -> str:
    return LETTER_RANGES if kind == LETTERS else re.escape(kind)
