"""A part of what a worker uses of CUDA, and the ways in which it can be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.proving.table import ServedShape, Speed

Prove = Callable[[ServedShape], Speed | None]
"""Does the part in one way on the device of the shape, compares the result with an oracle, and says how fast it was.

Raises WrongResult where they differ, and whatever the way itself raises. It imports what it needs (Triton, FlashInfer)
when it is called: what is missing is then a reason like any other. It returns when the device is done.
"""


class WrongResult(Exception):
    """A way computes something else than its oracle."""


class WayAbsent(Exception):
    """A way that a machine may do without is not installed, or not made for such a model or GPU; nothing is broken."""


@dataclass(frozen=True, slots=True)
class Way:
    """``prove`` None: it uses nothing of CUDA that could fail, such as doing without. ``needs`` are (part, way) that
    must have passed before; without one of them it is not tried.
    """

    name: str
    prove: Prove | None = None
    needs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """``ways`` are in order of preference. ``proves_all``: settings choose among those that pass, so all are tried."""

    name: str
    ways: tuple[Way, ...]
    proves_all: bool = False
