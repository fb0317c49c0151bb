"""What takes bytes from outside a process, with samples of what it takes and the errors that it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shared.errors import ThermoclineError


def as_it_is(data: bytearray) -> None:
    """Formats without checksums have nothing to make right again."""


@dataclass(frozen=True)
class Target:
    """``decode`` takes any bytes and raises nothing but ``promised``.

    ``reseal`` makes the checksums of changed bytes right again, in place where that is possible, so that what lies
    behind them is reached too. ``weight`` is its share of the inputs.
    """

    name: str
    decode: Callable[[bytes], object]
    promised: tuple[type[ThermoclineError], ...]
    samples: tuple[bytes, ...]
    reseal: Callable[[bytearray], None] = as_it_is
    weight: int = 1


def failure_of(target: Target, data: bytes) -> str:
    """What ``target`` did with ``data`` that it must not do, "" where it is right."""
    try:
        target.decode(data)
    except target.promised:
        return ""
    except MemoryError:
        return "allocates without bound (MemoryError)"
    except Exception as error:
        return f"raises {type(error).__module__}.{type(error).__qualname__}"
    return ""


class FoundInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file of ``tests/fuzz/found``: an input that broke ``target`` once, and how. A regression test replays it."""

    target: str
    failure: str
    data: bytes
    case: str = ""
    """The seed and the number that made it."""
