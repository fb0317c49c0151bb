"""Where the fold tells the hotness filter what happens to nodes (HotPrefix 3.2.2).

A node is known by its ``digest``, a hash of everything from the root through the node's *head* (ADR 0008). While
it is cached all of its tokens are used alike, because a request that uses a part of a node cuts it there; only what
is remembered from before an eviction belongs to the head alone. That is how a cut shares frequency out: the upper
part keeps the node's, the lower part gets the uses since the node was computed, which are its own too, and
whatever is remembered of the prefix that begins there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.hotness.room import level_of, make_room
from services.scheduler.core.cache.prefix_tree import Node, head_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.state import CellState
    from services.scheduler.core.step import Step


def request_admitted(step: Step, reused: Sequence[Node]) -> None:
    """A request was admitted that reuses these nodes, top first, maybe none: their prefixes got hotter.

    Every ``aging_requests`` admissions all clocks go down by one first.
    """
    state = step.state
    if state.admissions % state.config.aging_requests == 0:
        state.hotness.age()
    for above, node in enumerate(reused):
        _touch(state, node, above + 1)


def node_inserted(step: Step, node: Node) -> None:
    """Computed KV became a node. A prefix that comes back after its eviction is still known."""
    _touch(step.state, node, level_of(step.state.tree, node))


def node_recomputed(step: Step, node: Node) -> None:
    """A request computed tokens that a node had already, because it could not reuse them: one more use of them."""
    node.hits += 1
    _touch(step.state, node, level_of(step.state.tree, node))


def node_split(state: CellState, upper: Node, lower: Node) -> None:
    """A node was cut in two; the upper part is as hot as the whole was, the lower as hot as it was by itself."""
    tree, hotness = state.tree, state.hotness
    head = head_of(tree, head_of(tree, upper.tokens) + head_of(tree, lower.tokens))
    whole = extend(tree.nodes[upper.parent].end_digest, head)
    frequency, clock = hotness.lookup(whole)
    if not frequency:
        return  # It found no room when it was inserted.
    level = level_of(tree, upper)
    if upper.digest != whole:  # Its head is shorter than the node's was.
        known, _ = hotness.lookup(upper.digest)
        _raise(state, upper, max(frequency, known + 1 + upper.hits), clock, level)
    known, _ = hotness.lookup(lower.digest)
    _raise(state, lower, known + 1 + lower.hits, clock, level + 1)


def prefix_read(state: CellState, digest: int, level: int) -> None:
    """A prefix was used that no node stands for; the node that may come to do so is remembered by ``digest``."""
    _touch_digest(state, digest, level)


def _touch(state: CellState, node: Node, level: int) -> None:
    _touch_digest(state, node.digest, level)


def _touch_digest(state: CellState, digest: int, level: int) -> None:
    """One more use, which is remembered unless the filter can neither forget nor grow."""
    if state.hotness.touch(digest, level):
        return
    if not make_room(state) or not state.hotness.touch(digest, level):
        state.count("hotness_overflows")


def _raise(state: CellState, node: Node, frequency: int, clock: int, level: int) -> None:
    """Set what a part of a node has; another prefix that shares its entry does not get colder by it."""
    clock = max(clock, state.hotness.lookup(node.digest)[1])
    if state.hotness.put(node.digest, frequency, clock, level):
        return
    if not make_room(state) or not state.hotness.put(node.digest, frequency, clock, level):
        state.count("hotness_overflows")
