"""Suggestions for unknown names, as the end of a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

NEAR = 0.7
"""Likeness from which on a name is taken for another one misspelt."""

_LOOKED_AT = 5

_NEAR_CHOICE = 0.5
"""The same for choices, which are few and short, and all named anyway."""


_UNITS = ("bytes_per_s", "bytes", "tokens", "ms", "s")


def nearest(name: str, known: Iterable[str], before: str = "", cutoff: float = NEAR) -> str:
    """Return ``; did you mean X?`` for the nearest of ``known``, or "" where none is near.

    A unit that both end with makes names no likelier: ``disk_read_bytes_per_s`` is no other spelling of
    ``sparse_reorder_bytes_per_s``.
    """
    close = [
        each
        for each in difflib.get_close_matches(name, list(known), n=_LOOKED_AT, cutoff=cutoff)
        if difflib.SequenceMatcher(None, *_without_common_unit(each, name)).ratio() >= cutoff
    ]
    return f"; did you mean {before}{close[0]}?" if close else ""


def _without_common_unit(one: str, other: str) -> tuple[str, str]:
    """Return both names without the unit that both end with, where both have more than that."""
    for unit in _UNITS:
        ends = [f"{between}{each}" for between in "_-" for each in (unit, unit.replace("_", "-"), unit.upper())]
        end = next((end for end in ends if one.endswith(end) and other.endswith(end)), "")
        if end:
            return one.removesuffix(end), other.removesuffix(end)
    return one, other


def fault_of_choice(value: object, choices: Sequence[str]) -> str:
    """Return the fault of a ``value`` that is none of ``choices``, with all of them and the nearest one."""
    near = nearest(str(value).lower(), choices, cutoff=_NEAR_CHOICE)
    return f"{value!r} is none of {', '.join(choices)}{near}"
