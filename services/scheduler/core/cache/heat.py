"""How hot a node is by the configured expression, and which coldest nodes would make room for it.

An expression joins one to three of clock, frequency and length by +, * and / (HotPrefix 4). ``frequency + clock /
length`` is Equation 5 and ``frequency * clock`` Equation 6. Products and quotients bind before sums, and equal ones
from left to right. Text is cut into words here and never handed to an interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from services.scheduler.core.cache.candidates import Candidates, HeatRank, RankOf, put_back, take_least
from services.scheduler.core.cache.prefix_tree import Node, page_count
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from services.scheduler.core.state import CellState


# Victims of one choice at most: a node that needs more of the coldest than this is not brought in.
_MOST_VICTIMS = 128


def hotness(state: CellState, node: Node) -> float:
    """Return the node's hotness (HotPrefix, Equation 6, unless ``hotness_expression`` is set). Changes nothing."""
    return _hotness(state, node, *state.hotness.lookup(node.digest))


def worth(state: CellState, node: Node) -> float:
    """Return the worth of a host copy: the node's hotness times its measured importance. Changes nothing."""
    return hotness(state, node) * node.importance


def _hotness(state: CellState, node: Node, frequency: int, clock: int) -> float:
    return value_of(state, frequency=frequency, clock=clock, length=node.size)


def value_of(state: CellState, *, frequency: int, clock: int, length: int) -> float:
    """Return the hotness of ``length`` tokens with this frequency and clock, cached or not. Changes nothing."""
    return parse(state.config.hotness_expression)(clock=clock, frequency=frequency, length=length)


def promotion_value(state: CellState, node: Node, record: tuple[int, int] | None = None) -> float:
    """Return the node's value for promotion (HotPrefix 5.3.4): hotness, or clock, frequency or shallowness alone.

    ``record`` is the node's (frequency, clock) where the caller has looked it up already. Changes nothing.
    """
    criterion = state.config.promotion
    if criterion == "depth":
        return float(-node.depth)
    frequency, clock = record or state.hotness.lookup(node.digest)
    if criterion == "hotness":
        return _hotness(state, node, frequency, clock)
    return float(clock if criterion == "recency" else frequency)


def coldest_together(
    state: CellState,
    index: Candidates,
    pages: int,
    *,
    rank_of: RankOf,
    rank_when_bare: Callable[[Node, int], HeatRank | None],
    is_colder: Callable[[float], bool],
    spared: Container[int] = (),
) -> list[Node] | None:
    """Return the coldest nodes of ``index`` that together have ``pages``, children first; None if there are too few.

    ``rank_when_bare(parent, gone)`` ranks a parent that could go once ``gone`` of its children have. Every node
    must satisfy ``is_colder``, and none is ``spared``. They stay in the index only if None is returned. Only the index
    changes; the caller has refreshed it.
    """
    found: list[tuple[HeatRank, int]] = []
    aside: list[tuple[HeatRank, int]] = []  # Spared nodes, or one too many; they are put back.
    bared: list[tuple[HeatRank, int]] = []
    gone: dict[int, int] = {}
    have = 0
    following = take_least(index, rank_of)
    while have < pages and len(found) < _MOST_VICTIMS:
        while following is not None and following[1] in spared:
            aside.append(following)
            following = take_least(index, rank_of)
        if bared and (following is None or bared[0] < following):
            least = heappop(bared)
        elif following is not None:
            least, following = following, None
        else:
            break
        if not is_colder(least[0][0]):
            aside.append(least)
            break
        found.append(least)
        node = state.tree.nodes[least[1]]
        have += page_count(state.tree, node)
        parent = state.tree.nodes[node.parent]
        gone[parent.id] = gone.get(parent.id, 0) + 1
        bare = rank_when_bare(parent, gone[parent.id]) if parent.id not in spared else None
        if bare is not None:
            heappush(bared, (bare, parent.id))
        if following is None and have < pages:
            following = take_least(index, rank_of)
    if following is not None:
        aside.append(following)
    is_enough = have >= pages
    for rank, node_id in aside if is_enough else aside + found:
        put_back(index, rank, node_id)
    return [state.tree.nodes[node_id] for _, node_id in found] if is_enough else None


TERMS = {"clock": 0, "frequency": 1, "freq": 1, "length": 2}
"""Names that an expression may use, and the place of each among the values."""

OPERATORS = "+*/"
MOST_TERMS = 3
_WORD = re.compile(r"[A-Za-z_]\w*|\S")


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of products; each factor is (whether it divides, the place of its value in :data:`TERMS`).

    Unless it divides by the clock, its value never falls as the clock rises.
    """

    text: str
    products: tuple[tuple[tuple[bool, int], ...], ...]
    names_clock: bool
    divides_by_clock: bool

    def __call__(self, *, clock: float, frequency: float, length: float) -> float:
        """Return the value; ``length`` is in tokens. All three are at least 0, and so is the finite result.

        A divisor of 0 counts as 1: the values are whole numbers, so the least meaningful divisor keeps the order of the
        dividends.
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
    """Parse an expression. Raises ConfigError with the fault and its column (from 1) for invalid text."""
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
