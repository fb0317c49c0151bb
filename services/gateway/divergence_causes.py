"""The usual cause for which a prompt leaves the nearest cached path, judged by the texts at that place. Pure.

Each rule looks for a text of one kind that spans the place on both sides: a date, an identifier, a number. Where the
texts do not tell, the part of the prompt decides. These are the usual causes, not proofs.
"""

from __future__ import annotations

import re

from services.gateway.openai_schema.explanation import Cause
from services.gateway.prompt_places import Place

_MONTHS = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec)"
_MONTH = rf"(?:{_MONTHS}\b\.?|january|february|march|april|june|july|august|september|october|november|december)"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?\b"
_DATE = re.compile(
    "|".join(
        (
            r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?Z| ?[+-]\d{2}:?\d{2})?)?",
            r"\d{1,4}[./]\d{1,2}[./]\d{2,4}",
            r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b\.?)?",
            rf"(?:\d{{1,2}}(?:st|nd|rd|th)?[ -])?\b{_MONTH}(?:[ -]\d{{1,4}}(?:st|nd|rd|th)?)?(?:,? ?\d{{4}})?",
            rf"\b{_DAY}",
            r"\b1[5-9]\d{8}(?:\d{3}|\d{6})?\b",  # Unix time of 2017 to 2033, in seconds, milliseconds or microseconds.
        )
    ),
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*[A-Za-z0-9]{4,}\b",
    re.IGNORECASE,
)
_SHORTEST_IDENTIFIER = 8
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_VARIABLE = re.compile(
    r"reasoning(?:[ _]effort)?: ?\w+|</?think>|enable_thinking\W+\w+|/(?:no_)?think\b", re.IGNORECASE
)
_TOOL = re.compile(r"""["']?name["']?\s*[:=]\s*["']([^"']+)["']""")
_LEAST_SQUEEZED = 8
_NEAR_CHARACTERS = 40


def cause_of(before: str, prompt: str, cached: str | None, place: Place | None) -> Cause:
    """Return the usual cause of a difference between ``prompt`` and ``cached``, both behind ``before``.

    ``cached`` is None where the caller may not see it, and ``place`` where it is not known; then less can be said.
    """
    if cached is None:
        return _own_cause(before, prompt, place)
    if _squeezed_alike(prompt, cached):
        return "whitespace"
    if place is None or place.part == "tools":
        found = _of_tools(before, prompt, cached, place)
        if found is not None:
            return found
    sides = (before + prompt, before + cached)
    at = len(before)
    if all(_spans(_DATE, side, at) for side in sides):
        return "date_or_time"
    if all(_spans(_IDENTIFIER, side, at, _SHORTEST_IDENTIFIER) for side in sides):
        return "identifier"
    if all(_spans(_NUMBER, side, at) for side in sides):
        return "number"
    if any(_spans(_VARIABLE, side, at) for side in sides):
        return "template_variable"
    return _of_place(place)


def _own_cause(before: str, prompt: str, place: Place | None) -> Cause:
    """Return the cause that the prompt alone suggests: a text shortly behind the place that changes with every request.

    The place is then known to the page, not to the token.
    """
    side, at = before + prompt[:_NEAR_CHARACTERS], len(before)
    if any(match.end() > at for match in _DATE.finditer(side)):
        return "date_or_time"
    if any(match.end() > at and len(match[0]) >= _SHORTEST_IDENTIFIER for match in _IDENTIFIER.finditer(side)):
        return "identifier"
    return "tools_changed" if place is not None and place.part == "tools" else _of_place(place)


def _of_tools(before: str, prompt: str, cached: str, place: Place | None) -> Cause | None:
    """Return the cause by the names of the tools that differ, or that come first behind the difference."""
    ours, theirs = (_tool_at(before + side, len(before)) for side in (prompt, cached))
    if ours and theirs and ours != theirs:
        known = place.tools if place is not None else ()
        others = (*known, *(match[1] for match in _TOOL.finditer(prompt)))
        return "tools_reordered" if theirs in others else "tools_changed"
    return "tools_changed" if place is not None else None


def _tool_at(text: str, at: int) -> str:
    return next((match[1] for match in _TOOL.finditer(text) if match.end() > at), "")


def _of_place(place: Place | None) -> Cause:
    if place is None:
        return "unknown"
    if place.part != "message":
        return "tools_changed" if place.part == "tools" else "template_variable"
    match place.role:
        case "system" | "developer":
            return "system_prompt"
        case "assistant":
            return "answer_changed"
        case "tool":
            return "tool_result"
    return "other_conversation" if place.is_first else "other_turn"


def _spans(pattern: re.Pattern[str], text: str, at: int, shortest: int = 1) -> bool:
    """Return whether a match of the pattern contains position ``at`` of the text, or ends just before it."""
    return any(
        match.start() <= at <= match.end() and match.end() - match.start() >= shortest
        for match in pattern.finditer(text)
    )


def _squeezed_alike(prompt: str, cached: str) -> bool:
    ours, theirs = ("".join(side.split()) for side in (prompt, cached))
    length = min(len(ours), len(theirs))
    return length >= _LEAST_SQUEEZED and ours[:length] == theirs[:length] and prompt[:1] != cached[:1]
