"""How hot a node is, by whatever the configuration says, and which coldest nodes would make room for it."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from services.scheduler.core.cache.candidates import Candidates, Rank, RankOf, put_back, take_least
from services.scheduler.core.cache.hotness.expression import parse
from services.scheduler.core.cache.prefix_tree import TOKEN_BYTES, Node, page_count

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from services.scheduler.core.state import CellState

# Of one choice: what is larger than so many of the coldest together is not brought in for them.
_MOST_VICTIMS = 128


def hotness(state: CellState, node: Node) -> float:
    """The node's hotness (HotPrefix, Equation 6, unless ``hotness_expression`` says otherwise). Does not mutate."""
    return _hotness(state, node, *state.hotness.lookup(node.digest))


def worth(state: CellState, node: Node) -> float:
    """What a copy of the node is worth in host memory: its hotness, by how important it proved. Does not mutate."""
    return hotness(state, node) * node.importance


def _hotness(state: CellState, node: Node, frequency: int, clock: int) -> float:
    return value_of(state, frequency=frequency, clock=clock, length=len(node.tokens) // TOKEN_BYTES)


def value_of(state: CellState, *, frequency: int, clock: int, length: int) -> float:
    """The hotness of so many tokens that are remembered like this, cached or not. Does not mutate."""
    return parse(state.config.hotness_expression)(clock=clock, frequency=frequency, length=length)


def promotion_value(state: CellState, node: Node, record: tuple[int, int] | None = None) -> float:
    """What promotion goes by (HotPrefix 5.3.4): hotness, or clock, frequency or shallowness alone. Does not mutate.

    ``record`` is the node's (frequency, clock) where the caller has looked it up already.
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
    rank_when_bare: Callable[[Node, int], Rank | None],
    is_colder: Callable[[float], bool],
    spared: Container[int] = (),
) -> list[Node] | None:
    """The coldest nodes of ``index`` that together have ``pages``, each child before its parent; None if too few.

    ``rank_when_bare(parent, gone)`` ranks a parent that could go once ``gone`` of its children have. Every node
    must satisfy ``is_colder``, and none is ``spared``. They stay in the index only if None is returned. Mutates the
    index alone, which the caller has refreshed.
    """
    found: list[tuple[Rank, int]] = []
    aside: list[tuple[Rank, int]] = []  # Spared, or one too many: goes back.
    bared: list[tuple[Rank, int]] = []
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
