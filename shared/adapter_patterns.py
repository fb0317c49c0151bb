"""Patterns of an adapter's configuration, which name modules of the model.

The adapter's author writes them, and a pattern of a few characters can keep a matcher busy for years. So all matching
for one adapter together is bounded in time, and other threads run meanwhile; ``re`` allows neither. The engine is a
requirement of Transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import regex

from shared.errors import AdapterRefused

MATCHING_S = 20.0
"""Seconds for all patterns of one adapter. An adapter with 560 modules, and as many patterns of ranks, takes two."""

MOST_CHARS = 8192
"""Characters of one pattern. Compiling takes time in proportion to them."""

_FAULTY = (regex.error, OverflowError, RecursionError, MemoryError, ValueError)


class Patterns:
    """The patterns of one adapter. Every method raises AdapterRefused once all calls together have taken too long."""

    def __init__(self, seconds: float = MATCHING_S, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count the time; ``clock`` is in seconds."""
        self._seconds, self._clock = seconds, clock
        self._end_s = clock() + seconds
        self._compiled: dict[str, Any] = {}

    def fault_of(self, pattern: str) -> str:
        """Return why this is no pattern, or ""."""
        if len(pattern) > MOST_CHARS:
            return f"it has more than {MOST_CHARS} characters"
        for expression in (pattern, _at_end(pattern)):
            try:
                self._expression(expression)
            except _FAULTY as error:
                return str(error) or type(error).__name__
        return ""

    def is_name(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches all of a module's name."""
        return self._matches(pattern, name)

    def ends_name(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches the end of a name, at a dot, as PEFT matches ranks and alphas."""
        return self._matches(_at_end(pattern), name)

    def _matches(self, expression: str, name: str) -> bool:
        compiled = self._expression(expression)
        try:
            found = compiled.fullmatch(name, timeout=self._left_s(), concurrent=True)
        except TimeoutError as error:
            raise self._too_slow() from error
        return found is not None

    def _expression(self, expression: str) -> Any:
        compiled = self._compiled.get(expression)
        if compiled is None:
            self._left_s()
            compiled = self._compiled[expression] = regex.compile(expression)
        return compiled

    def _left_s(self) -> float:
        left_s = self._end_s - self._clock()
        if left_s <= 0:
            raise self._too_slow()
        return left_s

    def _too_slow(self) -> AdapterRefused:
        return AdapterRefused(f"matching its patterns with the names of modules takes more than {self._seconds:g} s")


def _at_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"
