"""Numbers and strings of schemas that llguidance would change, or on which it ends the process. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from services.gateway.grammars.conjunctions import merges
from services.gateway.grammars.patterns import is_unspellable

MAX_EXACT: Final = 2**53
"""Limit on a number's magnitude and, without the decimal point, on its digits: llguidance reads them as doubles."""

MAX_DECIMALS: Final = 22
"""Limit on decimal places: the largest power of ten that is a double."""

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_INT64: Final = 2**63 - 1
"""The one larger ``maximum`` that is exact for integers, as llguidance saturates there."""


def value_faults(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the bounds, and with the values of ``enum`` and ``const``, of one schema."""
    for name in _BOUNDS:
        bound = part.get(name)
        is_saturated = name == "maximum" and bound == _MAX_INT64 and _has_only_integers(part)
        if _is_number(bound) and not _is_exact(bound) and not is_saturated:
            yield f"{name}: {_INEXACT}"
    for name in ("enum", "const"):
        waiting = [part.get(name)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, str):
                yield from (
                    f"{name}: U+{ord(each):04X} is not supported" for each in value if is_unspellable(ord(each))
                )
            elif _is_number(value) and not _is_exact(value):
                yield f"{name}: {_INEXACT}"


def narrow_fault(parts: Iterable[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with the intervals of numbers in all parts of a schema, or None.

    llguidance lets a whole exclusive bound through where the other bound is less than 1 away. Where several schemas may
    be merged, the bounds of all count as one interval.
    """
    everything = list(parts)
    of_numbers = [part for part in everything if not _has_only_integers(part)]
    if any(_meet(part) for part in everything):
        return _narrow(of_numbers)
    return next((fault for part in of_numbers if (fault := _narrow([part])) is not None), None)


_INEXACT = f"numbers may have up to 2**53, read without a decimal point, too, and {MAX_DECIMALS} decimal places"


def _narrow(parts: list[Mapping[str, Any]]) -> str | None:
    floors = {math.floor(bound) for bound in _bounds(parts, "maximum", "exclusiveMaximum") if bound % 1}
    ceilings = {math.ceil(bound) for bound in _bounds(parts, "minimum", "exclusiveMinimum") if bound % 1}
    for name, near in (("exclusiveMinimum", floors), ("exclusiveMaximum", ceilings)):
        if not near.isdisjoint(_bounds(parts, name)):
            return f"{name}: a whole number is supported only where the other bound is at least 1 away"
    return None


def _bounds(parts: list[Mapping[str, Any]], *names: str) -> list[int | float]:
    return [part[name] for part in parts for name in names if _is_number(part.get(name))]


def _meet(part: Mapping[str, Any]) -> bool:
    sources = any(name in part for name in ("allOf", "anyOf", "oneOf", "$ref"))
    return merges(part) or (sources and any(name in part for name in _BOUNDS))


def _has_only_integers(part: Mapping[str, Any]) -> bool:
    types = part.get("type")
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(number: Any) -> bool:
    """Return whether llguidance reads a number as it was written."""
    if not abs(number) <= MAX_EXACT:
        return False
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= MAX_EXACT and int(exponent) >= -MAX_DECIMALS
