"""The releases of PyTorch, Triton and Transformers with which models are served, compared with those installed.

pip keeps to the ranges of ``pyproject.toml``; environments made otherwise (``pip install --no-deps``, ``PYTHONPATH``, a
system's own packages) may not. So the ranges are here again, and a test compares them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

Release = tuple[int, int]


class Range(NamedTuple):
    """Releases to serve with: ``lowest`` is the oldest one, ``beyond`` the first that was never tried."""

    lowest: Release
    beyond: Release


RANGES: Mapping[str, Range] = {
    "torch": Range((2, 11), (2, 14)),
    "transformers": Range((5, 17), (5, 25)),
    "triton": Range((3, 6), (3, 8)),
}

_NEEDED = ("torch", "transformers")
"""Libraries that every worker needs; without Triton it serves on CPUs."""

_RELEASE = re.compile(r"(\d+)\.(\d+)")


@functools.cache
def installed(name: str) -> str:
    """Return the version of a distribution from its metadata; "" if there is none. Does not import the library."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def too_old(find: Callable[[str], str] = installed) -> Iterator[str]:
    """Yield a sentence for each library that is missing or older than the oldest release to serve with."""
    for name, found, release in _found(find):
        lowest = RANGES[name].lowest
        if not found and name in _NEEDED:
            yield f"{name} is not installed; {_text(lowest)} or later is needed"
        elif release is not None and release < lowest:
            yield f"{name} {found} is installed; {_text(lowest)} or later is needed"


def untried(find: Callable[[str], str] = installed) -> Iterator[str]:
    """Yield a sentence for each library that is newer than any tried release, or whose version has no number."""
    for name, found, release in _found(find):
        if found and (release is None or release >= RANGES[name].beyond):
            yield f"{name} {found} was never tried with this release, only those before {_text(RANGES[name].beyond)}"


def _found(find: Callable[[str], str]) -> Iterator[tuple[str, str, Release | None]]:
    for name in RANGES:
        found = find(name)
        numbers = _RELEASE.match(found)
        yield name, found, (int(numbers[1]), int(numbers[2])) if numbers else None


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
