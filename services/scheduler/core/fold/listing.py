"""What is cached, node by node, for operators. Nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import chunks_ending_in
from services.scheduler.core.cache.prefix_tree import TOKEN_BYTES, Node, PrefixTree, ancestors, namespace_of
from shared.messages.base import count_int32
from shared.messages.status import CachedNode, CacheListing, ListCache, PinStatus

if TYPE_CHECKING:
    from services.scheduler.core.cache.pin import Pin
    from services.scheduler.core.state import CellState

MOST_NODES = 1024
_HEAD_TOKENS = 16


def list_cache(state: CellState, call: ListCache) -> CacheListing:
    """One page of the listing: nodes by id (the order in which they were made), and all pins. Does not mutate.

    ``host_tokens`` and the like are not added up here: a node is as long as it is, on each tier that has it.
    """
    tree = state.tree
    most = min(max(1, call.max_nodes), MOST_NODES)
    wanted = sorted(node_id for node_id, node in tree.nodes.items() if node_id > call.after and node.parent)
    if call.namespace:
        wanted = [node_id for node_id in wanted if namespace_of(tree, tree.nodes[node_id]) == call.namespace]
    pinned = _pins_by_node(state)
    nodes = tuple(_describe(state, tree.nodes[node_id], pinned) for node_id in wanted[:most])
    pins = tuple(_pin(state, pin) for pin in state.pins.values() if call.namespace in ("", pin.namespace))
    return CacheListing(nodes=nodes, pins=pins, next_after=nodes[-1].id if len(wanted) > most else 0)


def _describe(state: CellState, node: Node, pinned: dict[int, list[str]]) -> CachedNode:
    tree = state.tree
    return CachedNode(
        id=node.id,
        parent=node.parent if tree.nodes[node.parent].parent else 0,
        namespace=namespace_of(tree, node),
        depth=node.depth,
        tokens=count_int32(node.tokens),
        hits=node.hits,
        head=node.tokens[: _HEAD_TOKENS * TOKEN_BYTES],
        device={owner: len(pages) // 4 for owner, pages in node.device.items()},
        host={owner: len(pages) // 4 for owner, pages in node.host.items()},
        disk=_chunks_by_storage(tree, node, {name: found.chunks for name, found in state.storages.items()}),
        state=_chunks_by_storage(tree, node, {name: found.hidden_chunks for name, found in state.storages.items()}),
        pins=tuple(pinned.get(node.id, ())),
    )


def _chunks_by_storage(tree: PrefixTree, node: Node, disks: dict[str, dict[bytes, None]]) -> dict[str, int]:
    """By storage, the chunks that end in this node and that its disk has, where the identities are known already."""
    if not node.identities:
        return {}
    names = chunks_ending_in(tree, node)
    found = {storage_id: sum(name in chunks for name in names) for storage_id, chunks in disks.items() if chunks}
    return {storage_id: held for storage_id, held in found.items() if held}


def _pins_by_node(state: CellState) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for pin in state.pins.values():
        for node in ancestors(state.tree, state.tree.nodes[pin.node]) if pin.node else ():
            found.setdefault(node.id, []).append(pin.pin_id)
    return found


def _pin(state: CellState, pin: Pin) -> PinStatus:
    return PinStatus(
        pin_id=pin.pin_id,
        namespace=pin.namespace,
        tokens=count_int32(pin.prefix),
        held_tokens=pin.pages * state.tree.page_size,
        pages=pin.pages,
        expires_ns=pin.expires_ns,
        refusal=pin.refusal,
    )
