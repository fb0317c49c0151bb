"""What importance nodes of the tree have, from what chunks read in part have proved (see :mod:`shares`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import chunks_ending_in, page_identities
from services.scheduler.core.cache.residency import offer
from services.scheduler.core.cache.shares import NEUTRAL

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node, Path
    from services.scheduler.core.state import CellState, Storage


def value_node(state: CellState, storage: Storage | None, node: Node) -> None:
    """Give a node, new or not, the importance that its chunks have proved to have at this storage, if any."""
    if storage is None or not storage.shares.by_name or not state.config.importance_caching:
        return
    page_identities(state.tree, node)
    node.importance = storage.shares.importance_of(chunks_ending_in(state.tree, node))


def value_path(state: CellState, storage: Storage, path: Path, start: int) -> None:
    """The same for what of a path lies behind ``start`` tokens; eviction learns of it."""
    for node, _ in path:
        if node.depth >= start:
            value_node(state, storage, node)
            offer(state, node)


def forget_importance(state: CellState) -> None:
    """No node counts for more than another any more, after the setting was switched off."""
    for node in state.tree.nodes.values():
        if node.importance != NEUTRAL:
            node.importance = NEUTRAL
            offer(state, node)
