"""Paths to be saved that found no room: a bounded queue for each storage, first come first served.

A path is queued under its last node with the number of its first unsaved chunk, counted from the root. A node that is
cut keeps its place, for its lower part keeps its id; when a node is removed, the path above it is still to be saved.
Waiting locks nothing: chunks whose last copy is evicted before their turn are lost, which is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.chunks import chunk_tokens

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Storage

MOST_UNSAVED = 256
"""Paths at most that wait for one storage."""


def put_off(state: CellState, storage: Storage, end: Node, first: int, chunks: int) -> None:
    """Queue the chunks of the path to ``end``, from number ``first`` on, to be saved later; a full queue drops them.

    ``chunks`` is their number, for the counters.
    """
    known = storage.disk.unsaved.get(end.id)
    if known is not None:
        storage.disk.unsaved[end.id] = min(known, first)
    elif len(storage.disk.unsaved) < MOST_UNSAVED:
        state.count("saves_put_off_chunks", chunks)
        storage.disk.unsaved[end.id] = first
    else:
        state.count("saves_refused_chunks", chunks)


def move_up(state: CellState, gone: list[Node], parent: Node | None) -> None:
    """Move the queue entries of removed nodes up to their ``parent``; drop them where that is None or a root.

    ``gone`` has children before their parents. Their chunks that waited to be saved are counted as lost.
    """
    for storage in state.storages.values():
        unsaved = storage.disk.unsaved
        if not unsaved:
            continue
        firsts: dict[int, int] = {}  # By removed node, the first chunk to save of its path.
        for node in gone:
            waiting = [each.pop(node.id) for each in (unsaved, firsts) if node.id in each]
            if waiting:
                first = min(waiting)
                _count_lost(state, storage, node, first)
                firsts[node.parent] = min(first, firsts.get(node.parent, first))
        if parent is not None and parent.parent and parent.id in firsts:
            unsaved[parent.id] = min(firsts[parent.id], unsaved.get(parent.id, firsts[parent.id]))


def _count_lost(state: CellState, storage: Storage, node: Node, first: int) -> None:
    """Count the chunks ending in a removed node, from number ``first`` of its path on, that the storage lacks."""
    page_size = state.tree.page_size
    names = node.chunks_ending(page_size)[max(0, first - node.depth // chunk_tokens(page_size)) :]
    disk, hidden = storage.disk, storage.hidden
    places = (disk.chunks, disk.saving, disk.taken, hidden.chunks, hidden.saving)
    if lost := sum(all(name not in each for each in places) for name in names):
        state.count("saves_lost_chunks", lost)
