"""A part of a worker's use of CUDA, and the ways in which it can be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.proving.table import ServedShape, Speed

Prove = Callable[[ServedShape], Speed | None]
"""Do the part in one way on the device of the shape, compare the result with an oracle, and return its speed.

Raises WrongResult where they differ, and any error of the way itself. Its imports (Triton, FlashInfer) are in the call,
so that a missing package is a fault like any other. It returns when the device has done all work.
"""


class WrongResult(Exception):
    """A way's result differs from its oracle's."""


class WayAbsent(Exception):
    """An optional way is not installed, or not made for such a model or GPU; nothing is broken."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to do a part.

    ``prove`` None: it uses nothing of CUDA that could fail, such as doing without. ``needs`` are (part, way) that must
    have passed before; without one of them it is not tried.
    """

    name: str
    prove: Prove | None = None
    needs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A part and its ``ways``, best first. ``proves_all``: settings choose among those that pass, so all are tried."""

    name: str
    ways: tuple[Way, ...]
    proves_all: bool = False
