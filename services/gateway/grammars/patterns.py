"""Patterns of strings, in a form in which llguidance keeps to them.

llguidance matches a pattern against the JSON text of a string. It drops a character that no escape spells, and a class
with all of U+0000 to U+001F lets every escape through, those of quotes and backslashes too. So such a character is
refused, and no class keeps U+0000, which no answer can contain anyway. Pure.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from shared.errors import InvalidRequest

_HEX = "[0-9A-Fa-f]"
_ITEM: Final = re.compile(
    rf"\\(?:[xuU]\{{{_HEX}+\}}|x{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|[pP]\{{[^}}]{{0,80}}\}}|[pP].|.)|.", re.DOTALL
)
_NAMED: Final = {r"\a": 7, r"\t": 9, r"\n": 10, r"\v": 11, r"\f": 12, r"\r": 13}
_SPELT: Final = frozenset(map(ord, "\b\t\n\f\r"))
_CONTROLS: Final = re.compile(
    r"\\[pP]\{$|\\P(?!\{?[LMNSZ][a-z]?\}?$)|\\p.*[\^!]|\\p\{?(?:.*[=:])?(?i:c|cc|other|control|cntrl)\}?$", re.DOTALL
)
"""Unicode classes with all control characters, but without quotes or backslashes."""
_VERBOSE: Final = re.compile(r"\?[a-wyzA-Z-]*x")


def is_unspellable(code: int) -> bool:
    """Return whether no answer in JSON can contain the character, which only ``u`` would escape."""
    return (code < ord(" ") and code not in _SPELT) or code == 0x7F


def kept_pattern(pattern: str, *, param: str) -> str:
    """Return a pattern that matches the same strings and has no class with U+0000.

    Raises InvalidRequest, which names ``param``, where there is none, or where classes hold more than characters and
    ranges. A pattern that does not compile may be returned unchanged.
    """
    items, kept, place = _ITEM.findall(pattern), list[str](), 0
    while place < len(items):
        item, place = items[place], place + 1
        if item == "[":
            if (end := _end_of_class(items, place)) is None:
                return pattern
            kept.append(_kept_class(items[place:end], param))
            place = end
        elif item == "(" and _VERBOSE.match("".join(items[place : place + 9])):
            raise _refusal("the flag x", param)
        else:
            kept.append(_checked_item(item, param))
    return "".join(kept)


def _end_of_class(items: list[str], place: int) -> int | None:
    """Return the place of the ``]`` of a class whose content begins at ``place``, or None without one."""
    place += items[place : place + 1] == ["^"]
    place += items[place : place + 1] == ["]"]
    try:
        return items.index("]", place)
    except ValueError:
        return None


def _kept_class(items: list[str], param: str) -> str:
    """Return a class up to its last bracket, which remains to be added."""
    is_negated = items[0] == "^"
    body = items[is_negated:]
    if "[" in body or any(one == other and one in "&-~" for one, other in pairwise(body)):
        raise _refusal("[, &&, -- or ~~ in a class", param)
    body[0] = r"\]" if body[0] == "]" else body[0]  # As elsewhere, a range may begin with it.
    if not is_negated:
        return "[" + _kept_ranges(body, param)
    if body[0] != r"\x00":
        body[0] = r"\-" if body[0] == "-" else body[0]
        body.insert(0, r"\x00")
    return "[^" + "".join(_checked_property(item, param) for item in body)


def _kept_ranges(body: list[str], param: str) -> str:
    """Return the content of a class that is not negated, with U+0001 for U+0000 where a range begins."""
    kept, place = list[str](), 0
    while place < len(body):
        first = _code(body[place])
        last = _code(body[place + 2]) if body[place + 1 : place + 2] == ["-"] and place + 2 < len(body) else None
        if first is None or last is None or max(first, 1) == last:
            kept.append(_checked_item(body[place], param))
            place += 1
        else:
            kept += [r"\x01" if first == 0 else body[place], "-", body[place + 2]]
            place += 3
    return "".join(kept)


def _checked_item(item: str, param: str) -> str:
    code = _code(item)
    if code is not None and is_unspellable(code):
        raise _refusal(f"U+{code:04X}", param)
    return _checked_property(item, param)


def _checked_property(item: str, param: str) -> str:
    if _CONTROLS.match(item):
        raise _refusal(item, param)
    return item


def _code(item: str) -> int | None:
    """Return the code of the one character that an item matches; None for a class or an assertion."""
    if len(item) == 1:
        return ord(item)
    if item in _NAMED:
        return _NAMED[item]
    if item[1] in "xuU" and len(item) > 2:
        return int(item[2:].strip("{}"), 16)
    return None if item[1].isalnum() else ord(item[1])


def _refusal(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"pattern: {what} is not supported", param=param, code="unsupported_schema")
