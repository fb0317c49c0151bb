"""Keeping the hotness filter in bounds: what it forgets when it is full, and when it grows instead.

Half of the entries at the most are for nodes of the tree; the rest remembers prefixes that were evicted. So the
filter is bounded by the tree, and by the tree alone: prefixes that never come back cannot make it grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.prefix_tree import Node, PrefixTree, ancestors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.scheduler.core.state import CellState
    from shared.messages.cell_events import CellConfig

MOST_BASE_BITS = 24
FORGOTTEN_SHARE = 4
"""One entry in so many is freed at a time, so that looking through the whole filter for the coldest is rare."""


def make_room(state: CellState) -> bool:
    """An insertion failed: forget the coldest evicted prefixes, or grow if the tree needs it. True if either did."""
    hotness = state.hotness
    if 2 * len(state.tree.nodes) > hotness.capacity:
        if not hotness.grow():
            return _rebuild_larger(state)
        state.count("hotness_growths")
        return True
    forgotten = hotness.drop_coldest(_digests(state.tree), hotness.capacity // FORGOTTEN_SHARE)
    state.count("hotness_forgotten", forgotten)
    return forgotten > 0


def fit_widths(state: CellState, config: CellConfig) -> bool:
    """Rebuild the filter from the tree where the configured widths differ from its own; returns whether it did.

    What is remembered of evicted prefixes goes: their digests are not known any more.
    """
    old = state.hotness
    widths = (config.fingerprint_bits, config.clock_bits, config.frequency_bits, config.depth_bits)
    if widths == (old.fingerprint_bits, old.clock_bits, old.frequency_bits, old.depth_bits):
        return False
    state.hotness = _rebuilt(state.tree, old, widths, old.base_bits)
    return True


def level_of(tree: PrefixTree, node: Node) -> int:
    """The node's place in the tree: 1 below a root. Does not mutate."""
    return len(ancestors(tree, node))


def _rebuild_larger(state: CellState) -> bool:
    """The growth bits are used up: begin anew with them, at twice the size."""
    old = state.hotness
    base_bits = old.base_bits + old.doublings + 1
    if base_bits > MOST_BASE_BITS:
        return False
    widths = (old.fingerprint_bits, old.clock_bits, old.frequency_bits, old.depth_bits)
    state.hotness = _rebuilt(state.tree, old, widths, base_bits)
    state.count("hotness_rebuilds")
    return True


def _rebuilt(tree: PrefixTree, old: HotnessFilter, widths: tuple[int, int, int, int], base_bits: int) -> HotnessFilter:
    """A filter with what the old one knows of the tree's nodes; a clock keeps the agings since the last use."""
    fingerprint_bits, clock_bits, frequency_bits, depth_bits = widths
    new = HotnessFilter(
        fingerprint_bits=fingerprint_bits,
        clock_bits=clock_bits,
        frequency_bits=frequency_bits,
        depth_bits=depth_bits,
        growth_bits=old.growth_bits,
        base_bits=base_bits,
        ages=old.ages,
    )
    for node in tree.nodes.values():
        frequency, clock = old.lookup(node.digest)
        if not frequency:
            continue
        clock = max(0, new.max_age - (old.max_age - clock))
        depth = old.depth_of(node.digest)
        while not new.put(node.digest, frequency, clock, depth) and new.grow():
            pass
    return new


def _digests(tree: PrefixTree) -> NDArray[np.uint64]:
    return np.fromiter((node.digest for node in tree.nodes.values()), dtype=np.uint64, count=len(tree.nodes))
