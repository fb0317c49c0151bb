"""What is cached, node by node, for operators. Nothing is decided here."""

from __future__ import annotations

from services.scheduler.core.prefix_tree import IDENTITY_BYTES, TOKEN_BYTES, Node, PrefixTree, ancestors, namespace_of
from services.scheduler.core.state import CellState, Pin
from shared.chunks import chunk_pages
from shared.messages.base import count_int32
from shared.messages.status import CachedNode, CacheListing, ListCache, PinStatus

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
        disk={name: held for name in state.storages if (held := _chunks_on_disk(state, tree, node, name))},
        pins=tuple(pinned.get(node.id, ())),
    )


def _chunks_on_disk(state: CellState, tree: PrefixTree, node: Node, storage_id: str) -> int:
    """Chunks that end in this node and are on the disk, where the node's identities are known already."""
    chunks = state.storages[storage_id].chunks
    if not chunks or not node.identities:
        return 0
    per_chunk = chunk_pages(tree.page_size)
    first = node.depth // tree.page_size
    pages = len(node.identities) // IDENTITY_BYTES
    ends = range(-(first + 1) % per_chunk, pages, per_chunk)
    return sum(node.identities[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES] in chunks for at in ends)


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
