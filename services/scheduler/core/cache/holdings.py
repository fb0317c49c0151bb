"""What nodes hold, in few bytes: names, counts and depths that nodes share.

Most nodes hold nothing, or what many others hold too: names of pools, and counts of one, are the same object in all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

_MOST_SHARED = 4096
"""Values that are shared at the most; those that were not asked for lately are made again."""


class _Shared(dict[Any, Any]):
    """A dictionary that stays as it is."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("this dictionary is shared by nodes; give the node another one (see with_count)")

    __setitem__ = __delitem__ = setdefault = update = pop = popitem = clear = __ior__ = _refuse  # type: ignore[assignment]


EMPTY_MAP: dict[Any, Any] = _Shared()
"""What a node holds where it counts nothing. A million nodes with an empty dictionary each are 64 MB."""


@lru_cache(maxsize=_MOST_SHARED)
def counted_once(name: str) -> dict[str, int]:
    """The shared dictionary that counts one of this name."""
    return _Shared({name: 1})


@lru_cache(maxsize=_MOST_SHARED)
def shared_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """An equal tuple, the same one for all that ask for it."""
    return names


@lru_cache(maxsize=1 << 16)
def shared_depth(depth: int) -> int:
    """An equal number, the same one for all that ask for it. There are no more depths than pages in a context."""
    return depth


def with_count(held: dict[str, int], name: str, count: int) -> dict[str, int]:
    """The dictionary with this count, at least 1, of a name. A shared one is replaced, not changed."""
    if count == 1 and (not held or (len(held) == 1 and name in held)):
        return counted_once(name)
    if type(held) is _Shared:
        held = dict(held)
    held[name] = count
    return held


def shared_count(held: dict[str, int]) -> dict[str, int]:
    """The shared dictionary in place of one with a single name, where that is counted once."""
    ((name, count),) = held.items()
    return counted_once(name) if count == 1 else held


def without_count(held: dict[str, int], name: str) -> dict[str, int]:
    """The dictionary less a name, which it must have. An emptied one is replaced by :data:`EMPTY_MAP`."""
    if len(held) == 1 and name in held:
        return EMPTY_MAP
    if type(held) is _Shared:
        held = dict(held)
    del held[name]
    return held


def copied(held: dict[str, int]) -> dict[str, int]:
    """A dictionary with the same counts that another node may hold: the same one where it is shared."""
    return held if type(held) is _Shared else dict(held)
