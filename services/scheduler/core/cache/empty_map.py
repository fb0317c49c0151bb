"""Dictionaries that take memory only while they hold something: nodes have seven each, and most are empty."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

V = TypeVar("V")


class _Nothing(dict[Any, Any]):
    """An empty dictionary that stays empty."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("this empty dictionary is shared by all nodes; give the node one of its own (see with_entry)")

    __setitem__ = setdefault = update = __ior__ = _refuse  # type: ignore[assignment]


EMPTY_MAP: dict[Any, Any] = _Nothing()
"""What a node holds where it holds nothing. A million nodes with seven empty dictionaries each are 450 MB."""


def with_entry(held: dict[str, V], name: str, value: V) -> dict[str, V]:
    """The dictionary with one entry more or another value; the shared :data:`NOTHING` is replaced, not changed."""
    if not held:
        return {name: value}
    held[name] = value
    return held


def without_entry(held: dict[str, V], name: str) -> dict[str, V]:
    """The dictionary less one key, which it must have. An emptied one is replaced by :data:`NOTHING`."""
    del held[name]
    return held or EMPTY_MAP
