"""Suggestions for unknown names, as the end of a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

NEAR = 0.7
"""Likeness from which on a name is taken for another one misspelt."""

_NEAR_CHOICE = 0.5
"""The same for choices, which are few and short, and all named anyway."""


def nearest(name: str, known: Iterable[str], before: str = "", cutoff: float = NEAR) -> str:
    """Return ``; did you mean X?`` for the nearest of ``known``, or "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {before}{close[0]}?" if close else ""


def fault_of_choice(value: object, choices: Sequence[str]) -> str:
    """Return the fault of a ``value`` that is none of ``choices``, with all of them and the nearest one."""
    near = nearest(str(value).lower(), choices, cutoff=_NEAR_CHOICE)
    return f"{value!r} is none of {', '.join(choices)}{near}"
