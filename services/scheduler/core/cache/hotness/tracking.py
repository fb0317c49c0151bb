"""Updates of the hotness filter by what happens to nodes, and its size (HotPrefix 3.2.2).

A node is known by its ``digest``, a hash of everything from the root through the node's *head* (ADR 0008). While
it is cached all of its tokens are used alike, because a request that uses a part of a node cuts it there; only what
is remembered from before an eviction belongs to the head alone. That is how a cut shares frequency out: the upper
part keeps the node's, the lower part gets the uses since the node was computed, which are its own too, and
whatever is remembered of the prefix that begins there.

It has an entry for every :data:`HEAD_TOKENS` tokens of all pools together, no fewer than a new filter and no more than
:data:`MOST_ENTRIES`. Prefixes are told apart by heads, so that is at least as many as can be cached; where they are
longer, the other entries remember what was evicted. Should the tree ever need more than half of them, the filter
doubles. So pools and tree bound it: prefixes that never come back cannot make it grow.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.holdings import DIGEST_BYTES
from services.scheduler.core.cache.hotness.filter import LEAST_BASE_BITS, SLOTS, HotnessFilter
from services.scheduler.core.cache.prefix_tree import HEAD_TOKENS, Node, PrefixTree, head_of, way_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from services.scheduler.core.state import CellState
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import CellConfig


MANY = 12
"""Nodes from which on one vectorised lookup is cheaper than one for each."""

_RECORDS, _DIGESTS = attrgetter("record"), itemgetter(slice(DIGEST_BYTES))


def request_admitted(step: Step, reused: Sequence[Node]) -> None:
    """Heat the prefixes of the nodes that an admitted request reuses, top first; there may be none.

    Every ``aging_requests`` admissions all clocks go down by one first.
    """
    state = step.state
    if state.admissions % state.config.aging_requests == 0:
        state.hotness.age()
    if len(reused) >= MANY and state.hotness.touch_all(digests_of_nodes(reused), 1):
        return
    for above, node in enumerate(reused):
        _touch(state, node, above + 1)


def node_inserted(step: Step, node: Node) -> None:
    """Note computed KV that became a node. A prefix that comes back after its eviction is still known."""
    _touch(step.state, node, level_of(step.state.tree, node))


def node_recomputed(step: Step, node: Node) -> None:
    """Count one more use of a node's tokens that a request computed because it could not reuse them."""
    node.hits += 1
    _touch(step.state, node, level_of(step.state.tree, node))


def node_split(state: CellState, upper: Node, lower: Node) -> None:
    """Note a node that was cut in two: the upper part stays as hot as the whole, the lower as hot as by itself."""
    tree, hotness = state.tree, state.hotness
    first = [node.tokens_between(0, tree.head_tokens) for node in (upper, lower)]
    head = head_of(tree, b"".join(first))
    whole = extend(tree.nodes[upper.parent].end_digest, head)
    frequency, clock = hotness.lookup(whole)
    if not frequency:
        return  # The filter had no room when it was inserted.
    level = level_of(tree, upper)
    if upper.digest != whole:  # Its head is shorter than the node's was.
        known, _ = hotness.lookup(upper.digest)
        _raise(state, upper, max(frequency, known + 1 + upper.hits), clock, level)
    known, _ = hotness.lookup(lower.digest)
    _raise(state, lower, known + 1 + lower.hits, clock, level + 1)


def prefix_read(state: CellState, digest: int, level: int) -> None:
    """Note the use of a prefix without a node. A node that is made of it later has this ``digest``."""
    _touch_digest(state, digest, level)


def _touch(state: CellState, node: Node, level: int) -> None:
    _touch_digest(state, node.digest, level)


def _touch_digest(state: CellState, digest: int, level: int) -> None:
    """Count one more use of a digest; it is lost only if the filter can neither forget nor grow."""
    if state.hotness.touch(digest, level):
        return
    if not make_room_in_filter(state) or not state.hotness.touch(digest, level):
        state.count("hotness_overflows")


def _raise(state: CellState, node: Node, frequency: int, clock: int, level: int) -> None:
    """Set the values of a part of a node; another prefix that shares its entry does not get colder."""
    clock = max(clock, state.hotness.lookup(node.digest)[1])
    if state.hotness.put(node.digest, frequency, clock, level):
        return
    if not make_room_in_filter(state) or not state.hotness.put(node.digest, frequency, clock, level):
        state.count("hotness_overflows")


MOST_ENTRIES = 1 << 22
"""Entries at most that pool sizes alone ask for: 20 MiB, whose clocks are lowered within half a millisecond."""

MOST_BASE_BITS = 24
FORGOTTEN_SHARE = 4
"""One entry in so many is freed at a time, so that scans of the whole filter for the coldest are rare."""


def make_room_in_filter(state: CellState) -> bool:
    """Make room after a failed insertion: forget the coldest evicted prefixes, or grow if the tree needs it.

    Returns whether either was possible.
    """
    hotness = state.hotness
    if 2 * len(state.tree.nodes) > hotness.capacity:
        if not hotness.grow():
            return _rebuild_larger(state)
        state.count("hotness_growths")
        return True
    forgotten = hotness.drop_coldest(digests_of_nodes(state.tree.nodes.values()), hotness.capacity // FORGOTTEN_SHARE)
    state.count("hotness_forgotten", forgotten)
    return forgotten > 0


def base_bits_for(tokens: int) -> int:
    """Return the logarithm of the buckets of a filter for pools of so many tokens together."""
    entries = min(tokens // HEAD_TOKENS, MOST_ENTRIES)
    return max(LEAST_BASE_BITS, (-(-entries // SLOTS) - 1).bit_length())


def fit_pools(state: CellState) -> None:
    """Enlarge the filter to the size that the pools ask for, after one was added; it never shrinks.

    An empty filter begins anew at that size, which keeps all growth bits of an entry as a part of its fingerprint; any
    other doubles, and forgets nothing.
    """
    pages = sum(worker.pool.total for worker in state.workers.values())
    pages += sum(storage.pool.total for storage in state.storages.values() if storage.pool is not None)
    base_bits = base_bits_for(pages * state.tree.page_size)
    old = state.hotness
    if not old.occupied:
        if base_bits > old.base_bits + old.doublings:
            state.hotness = _empty_like(old, _widths_of(old), base_bits)
        return
    while base_bits > old.base_bits + old.doublings and old.grow():
        state.count("hotness_growths")


def fit_widths(state: CellState, config: CellConfig) -> bool:
    """Rebuild the filter from the tree where the configured widths differ from its own; return whether it did.

    What is remembered of evicted prefixes is lost: their digests are not known any more.
    """
    old = state.hotness
    widths = _widths_of(config)
    if widths == _widths_of(old):
        return False
    state.hotness = _rebuilt(state.tree, old, widths, old.base_bits + old.doublings)
    return True


def level_of(tree: PrefixTree, node: Node) -> int:
    """Return the node's level in the tree: 1 below a root. Changes nothing."""
    return len(way_to(tree, node).nodes)


def _rebuild_larger(state: CellState) -> bool:
    """Begin anew at twice the size, with new growth bits, once they are used up."""
    old = state.hotness
    base_bits = old.base_bits + old.doublings + 1
    if base_bits > MOST_BASE_BITS:
        return False
    state.hotness = _rebuilt(state.tree, old, _widths_of(old), base_bits)
    state.count("hotness_rebuilds")
    return True


def _rebuilt(tree: PrefixTree, old: HotnessFilter, widths: tuple[int, int, int, int], base_bits: int) -> HotnessFilter:
    """Return a filter with what the old one knows of the tree's nodes; a clock keeps the agings since the last use."""
    new = _empty_like(old, widths, base_bits)
    for node in tree.nodes.values():
        frequency, clock = old.lookup(node.digest)
        if not frequency:
            continue
        clock = max(0, new.max_age - (old.max_age - clock))
        depth = old.depth_of(node.digest)
        while not new.put(node.digest, frequency, clock, depth) and new.grow():
            pass
    return new


def _widths_of(hotness: HotnessFilter | CellConfig) -> tuple[int, int, int, int]:
    return hotness.fingerprint_bits, hotness.clock_bits, hotness.frequency_bits, hotness.depth_bits


def _empty_like(old: HotnessFilter, widths: tuple[int, int, int, int], base_bits: int) -> HotnessFilter:
    fingerprint_bits, clock_bits, frequency_bits, depth_bits = widths
    return HotnessFilter(
        fingerprint_bits=fingerprint_bits,
        clock_bits=clock_bits,
        frequency_bits=frequency_bits,
        depth_bits=depth_bits,
        growth_bits=old.growth_bits,
        base_bits=base_bits,
        ages=old.ages,
    )


def digests_of_nodes(nodes: Iterable[Node]) -> NDArray[np.uint64]:
    """Return each node's digest as the filter knows it, uint64."""
    return np.frombuffer(b"".join(map(_DIGESTS, map(_RECORDS, nodes))), dtype="<u8")
