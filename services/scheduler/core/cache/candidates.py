"""An index of nodes by how hot they are: the coldest of a pool, or the hottest that could come into it.

Heat drifts without any change to a node, because clocks age, so an index that is always right would have to be rebuilt
at every tick. This one is a heap of ranks as they were last seen. Whatever is taken from it is ranked again first;
nodes that changed are ranked again before the first choice of a step; and each such step looks at a few other entries
in turn, so that no rank stays old for much longer than one round of the index. A choice therefore lags behind an exact
one (docs/concepts/tiers.md says by how much). No operation looks at more than a bounded number of nodes.

An index is made when it is first needed and costs nothing before. It learns of older nodes over its next uses, some at
a time. It may name nodes that are gone or may not be chosen now: the caller's ``rank_of`` then returns None, and such a
node is noted again when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState

SETTLED = 128
"""Noted nodes that one :func:`refresh` ranks: more than a step notes, so that only a new index has a backlog."""

_SCANNED = 1024  # Node ids that one use of a new index looks up.
_SWEPT = 8
_RANKED_ANEW = 8  # Nodes that turn out to rank higher before one is taken all the same.
_CHILDREN_NOTED = 1024

HeatRank = tuple[float, int]
"""The deciding value, then a tie-breaker; the least is taken first."""

RankOf = Callable[[int], HeatRank | None]
"""Returns a node's present rank by its id; None when it may not be chosen."""


class Candidates(msgspec.Struct):
    """A heap of nodes by rank. ``latest`` has each node's valid rank; other entries of its id are void.

    Nodes in ``noted`` wait to be ranked.
    """

    entries: list[tuple[HeatRank, int]] = []
    latest: dict[int, HeatRank] = {}
    noted: dict[int, None] = {}
    cursor: int = 0  # Where in ``entries`` the last sweep ended.
    refreshed: int = -1  # Sequence number of the input of the last refresh.
    scanned: int = 0  # Nodes up to this id were looked at ...
    known_from: int = 0  # ... and those from this id on were noted as they changed.


def coldest_of_host(storage_id: str) -> str:
    """Return the key of the index of a host pool's copies, coldest first."""
    return f"coldest/host/{storage_id}"


def coldest_of_device(worker_id: str) -> str:
    """Return the key of the index of a device's leaves, coldest first."""
    return f"coldest/device/{worker_id}"


def hottest_below(worker_id: str) -> str:
    """Return the key of the index of a device's host roots, hottest first."""
    return f"hottest/{worker_id}"


def note_node(state: CellState, node: Node) -> None:
    """Have every index that may hold a node rank it again, because the node changed."""
    indexes = state.candidates
    keys = [coldest_of_device(worker_id) for worker_id in node.device]
    if node.host:
        keys += [coldest_of_host(storage_id) for storage_id in node.host]
        keys += [
            hottest_below(worker_id)
            for worker_id in state.workers
            if worker_id not in node.device and worker_id not in node.loading
        ]
    for key in keys:
        index = indexes.get(key)
        if index is not None:
            _note(state, index, node.id)


def note_children(state: CellState, node: Node, worker_id: str) -> None:
    """Note the children in host memory of a node that came to a device: they are host roots now.

    Only the newest 1,024 children are looked at.
    """
    index = state.candidates.get(hottest_below(worker_id))
    if index is None:
        return
    for child_id in islice(reversed(node.child_ids), _CHILDREN_NOTED):
        if state.tree.nodes[child_id].host:
            _note(state, index, child_id)


def index_of(state: CellState, key: str, may_be_chosen: Callable[[Node], bool]) -> Candidates:
    """Return the index of this key, made if there is none yet.

    Notes up to 1,024 ids of nodes that are older than the index and may be chosen.
    """
    index = state.candidates.get(key)
    nodes = state.tree.nodes
    if index is None:
        index = state.candidates[key] = Candidates(known_from=state.tree.next_id)
    following = min(index.scanned + _SCANNED, index.known_from)
    for node_id in range(index.scanned, following):
        node = nodes.get(node_id)
        if node is not None and may_be_chosen(node):
            index.noted[node_id] = None
    index.scanned = following
    return index


def _note(state: CellState, index: Candidates, node_id: int) -> None:
    index.noted[node_id] = None
    alive = state.tree.nodes
    if len(index.noted) > 2 * len(alive) + 64:
        index.noted = {known: None for known in index.noted if known in alive}


def refresh(state: CellState, index: Candidates, rank_of: RankOf) -> None:
    """Rank noted nodes, latest first, and a few others in turn. Bounded, and done once for each input."""
    if index.refreshed == state.last_seq:
        return
    index.refreshed = state.last_seq
    for _ in range(min(SETTLED, len(index.noted))):
        node_id, _nothing = index.noted.popitem()
        _set_rank(index, node_id, rank_of(node_id))
    for _ in range(min(_SWEPT, len(index.entries))):
        index.cursor = (index.cursor + 1) % len(index.entries)
        rank, node_id = index.entries[index.cursor]
        if index.latest.get(node_id) == rank:
            _set_rank(index, node_id, rank_of(node_id))
    alive = state.tree.nodes
    if len(index.latest) > 2 * len(alive) + 64:
        index.latest = {known: rank for known, rank in index.latest.items() if known in alive}
    if len(index.entries) > 2 * len(index.latest) + 64:
        index.entries = [(rank, known) for known, rank in index.latest.items()]
        heapify(index.entries)


def take_least(index: Candidates, rank_of: RankOf) -> tuple[HeatRank, int] | None:
    """Take out the node with the least known rank; return its present rank and id, or None when there is none."""
    ranked_anew = 0
    while index.entries:
        rank, node_id = heappop(index.entries)
        if index.latest.get(node_id) != rank:
            continue
        now = rank_of(node_id)
        if now is not None and (now <= rank or ranked_anew == _RANKED_ANEW):
            del index.latest[node_id]
            return now, node_id
        _set_rank(index, node_id, now)
        ranked_anew += now is not None
    return None


def put_back(index: Candidates, rank: HeatRank, node_id: int) -> None:
    """Undo :func:`take_least`."""
    _set_rank(index, node_id, rank)


def _set_rank(index: Candidates, node_id: int, rank: HeatRank | None) -> None:
    if rank is None:
        index.latest.pop(node_id, None)
    elif index.latest.get(node_id) != rank:
        index.latest[node_id] = rank
        heappush(index.entries, (rank, node_id))
