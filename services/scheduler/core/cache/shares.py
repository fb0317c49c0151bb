"""How important chunks proved that were read in part, and what nodes of the tree are worth by it (IMPRESS 4.4.2).

IMPRESS scores a chunk by its frequency times the share of its tokens that are important, and keeps what scores most.
Here one value decides what stays: how soon a node is used again, what it costs to bring back and its size are in it
already (:mod:`eviction.thermocline`; hotness for admission), and it is multiplied by the node's ``importance``:

    the average share of the node's chunks / the average share of all chunks read in part, from 1/4 to 4

Shares are about as large as the ratio that requests ask for, so it is by their relation that they tell chunks apart,
and a node of which nothing is known counts as one of average importance: 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.cache.identities import chunks_ending_in, page_identities
from services.scheduler.core.cache.prefix_tree import Node, Path
from services.scheduler.core.cache.residency import offer
from services.scheduler.core.sparse.sparse_records import ChunkShare, ChunkShares
from services.scheduler.core.state import CellState, Storage

MOST_CHUNKS = 65_536
"""Chunks of a storage of which shares are remembered; of more, those read longest ago are forgotten."""

LEAST_IMPORTANCE, MOST_IMPORTANCE = 0.25, 4.0

_NEUTRAL = 1.0
_WEIGHT = 0.25
"""Of a further read in the moving average."""


def note_shares(shares: ChunkShares, names: Iterable[bytes], chosen: bytes) -> None:
    """Of these chunks so many 255ths of the tokens were chosen, a byte for each. Mutates."""
    for name, share in zip(names, chosen, strict=True):
        known = shares.by_name.pop(name, None)
        if known is None:
            known = ChunkShare(share / 255)
        else:
            shares.total -= known.average
            known = ChunkShare(known.average + _WEIGHT * (share / 255 - known.average), known.reads + 1)
        shares.total += known.average
        shares.by_name[name] = known
    while len(shares.by_name) > MOST_CHUNKS:
        shares.total -= shares.by_name.pop(next(iter(shares.by_name))).average


def importance_of(shares: ChunkShares, names: Iterable[bytes]) -> float:
    """What tokens of these chunks are worth beside those of others; 1 where nothing is known. Does not mutate."""
    known = [shares.by_name[name].average for name in names if name in shares.by_name]
    if not known or shares.total <= 0:
        return _NEUTRAL
    relation = sum(known) / len(known) * len(shares.by_name) / shares.total
    return min(MOST_IMPORTANCE, max(LEAST_IMPORTANCE, relation))


def value_node(state: CellState, storage: Storage | None, node: Node) -> None:
    """Give a node, new or not, the importance that its chunks have proved to have at this storage, if any."""
    if storage is None or not storage.shares.by_name or not state.config.importance_caching:
        return
    page_identities(state.tree, node)
    node.importance = importance_of(storage.shares, chunks_ending_in(state.tree, node))


def value_path(state: CellState, storage: Storage, path: Path, start: int) -> None:
    """The same for what of a path lies behind ``start`` tokens; eviction learns of it."""
    for node, _ in path:
        if node.depth >= start:
            value_node(state, storage, node)
            offer(state, node)


def forget_importance(state: CellState) -> None:
    """No node counts for more than another any more, after the setting was switched off."""
    for node in state.tree.nodes.values():
        if node.importance != _NEUTRAL:
            node.importance = _NEUTRAL
            offer(state, node)
