"""Snapshots: the state as bytes and back. Equal states give equal bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction.ranked import RankedPolicy
from services.scheduler.core.explain.recollection import forgotten
from services.scheduler.core.state import CellState
from shared.errors import CodecError
from shared.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node

_VERSION = 11


class _Snapshot(msgspec.Struct):
    version: int
    state: CellState


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Snapshot)


def encode_state(state: CellState) -> bytes:
    """The whole state. A fold that goes on from it gives the same outputs as one that never stopped.

    What is remembered for explanations alone is left out: it grows large, and no output depends on it.
    """
    return _ENCODER.encode(_Snapshot(_VERSION, msgspec.structs.replace(state, recollection=None)))


def decode_state(data: bytes) -> CellState:
    """Undo :func:`encode_state`; raises CodecError for bytes that are no snapshot of this version."""
    try:
        snapshot = _DECODER.decode(data)
    except UNDECODABLE as error:
        raise CodecError(f"not a snapshot: {error}") from error
    if snapshot.version != _VERSION:
        raise CodecError(f"snapshot of version {snapshot.version}, not {_VERSION}")
    snapshot.state.recollection = forgotten()
    _share_ids(snapshot.state.tree.nodes)
    for policy in snapshot.state.orders.values():
        if isinstance(policy, RankedPolicy):
            _share_ranks(policy, snapshot.state.tree.nodes)
    for account in snapshot.state.quotas.accounts.values():
        for order in account.orders.values():
            _share_ranks(order, snapshot.state.tree.nodes)
    return snapshot.state


def _share_ids(nodes: dict[int, Node]) -> None:
    """Let everything that names a node hold the same number object again, as when the nodes were made.

    Decoding makes a number of its own for every mention of an id: three more for each node, of 32 bytes.
    """
    for node_id, node in nodes.items():
        node.id = node_id
    for node in nodes.values():
        above = nodes.get(node.parent)
        if above is not None:
            node.parent = above.id
        children = node.children
        for key, child_id in children.items():
            child = nodes.get(child_id)
            if child is not None:
                children[key] = child.id


def _share_ranks(policy: RankedPolicy, nodes: dict[int, Node]) -> None:
    """The same for ranks, which a policy names twice: 200 bytes for each node that may be evicted."""
    ids = {node_id: nodes[node_id].id if node_id in nodes else node_id for node_id in policy.latest}
    policy.latest = {ids[node_id]: rank for node_id, rank in policy.latest.items()}
    entries = []
    for rank, node_id in policy.entries:
        latest = policy.latest.get(node_id)
        entries.append((latest if latest is not None and latest == rank else rank, ids.get(node_id, node_id)))
    policy.entries = entries
