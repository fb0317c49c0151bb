"""Paths to be saved that found no room: a bounded queue for each storage, first come first served.

A path is queued under its last node with the number of its first unsaved chunk, counted from the root. A node that is
cut keeps its place, for its lower part keeps its id; when a node is removed, the path above it is still to be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """Move the queue entries of removed nodes up to their ``parent``; drop them where that is None or a root."""
    for storage in state.storages.values():
        if not storage.disk.unsaved:
            continue
        for node in gone:
            first = storage.disk.unsaved.pop(node.id, None)
            if first is not None and parent is not None and parent.parent:
                storage.disk.unsaved[parent.id] = min(first, storage.disk.unsaved.get(parent.id, first))
