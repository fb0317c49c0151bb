"""The user-set form of a priority: one to three of clock, frequency and length, joined by +, * and / (HotPrefix 4).

``frequency + clock / length`` is Equation 5 and ``frequency * clock`` Equation 6. Products and quotients bind
before sums, and equal ones from left to right. Text is cut into words here and never handed to an interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from shared.errors import ConfigError

TERMS = {"clock": 0, "frequency": 1, "freq": 1, "length": 2}
"""What an expression may name, and its place among the values."""

OPERATORS = "+*/"
MOST_TERMS = 3
_WORD = re.compile(r"[A-Za-z_]\w*|\S")


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of products. Each factor is (whether it divides, the place of its value in :data:`TERMS`).

    Where it does not divide by the clock, its value never falls as the clock rises.
    """

    text: str
    products: tuple[tuple[tuple[bool, int], ...], ...]
    names_clock: bool
    divides_by_clock: bool

    def __call__(self, *, clock: float, frequency: float, length: float) -> float:
        """Its value; ``length`` is in tokens. All three are at least 0 and so is the value, which is finite.

        A divisor of 0 counts as 1: the values are whole numbers, so the least divisor that means anything keeps
        the order of what it divides.
        """
        values = (clock, frequency, length)
        total = 0.0
        for product in self.products:
            value = 1.0
            for divides, place in product:
                if divides:
                    value /= values[place] or 1
                else:
                    value *= values[place]
            total += value
        return total


@lru_cache(maxsize=256)
def parse(text: str) -> Expression:
    """Raises ConfigError, saying what is wrong and at which column (from 1), for text that is no expression."""
    words = [(found.group(), found.start() + 1) for found in _WORD.finditer(text)]
    if not words:
        raise ConfigError("an expression is empty; write for example frequency + clock / length")
    products: list[list[tuple[bool, int]]] = [[]]
    divides = False
    for position, (word, column) in enumerate(words):
        if position % 2 == 0:
            place = TERMS.get(word)
            if place is None:
                raise _fault(text, column, f"{word[:20]!r} is none of clock, frequency (or freq) and length")
            if position // 2 == MOST_TERMS:
                raise _fault(text, column, f"an expression has at most {MOST_TERMS} terms")
            products[-1].append((divides, place))
        elif word not in OPERATORS:
            raise _fault(text, column, f"{word[:20]!r} is none of the operators + * /")
        else:
            divides = word == "/"
            if word == "+":
                products.append([])
    if len(words) % 2 == 0:
        raise _fault(text, len(text.rstrip()) + 1, f"a term is missing after {words[-1][0]!r}")
    clocks = [divides for product in products for divides, place in product if place == TERMS["clock"]]
    return Expression(text, tuple(tuple(product) for product in products), bool(clocks), any(clocks))


def _fault(text: str, column: int, what: str) -> ConfigError:
    return ConfigError(f"expression {text[:80]!r}, column {column}: {what}")
