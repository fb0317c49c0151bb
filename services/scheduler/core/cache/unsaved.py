"""Paths that are to be saved and for which there was no room: a bounded line for each storage, first come first served.

A path stands in line by its last node and by the first of its chunks that is left, counted from the root. A node that
is cut keeps its place, for its lower part keeps its id; when a node is removed, what is above it is still to be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Storage

MOST_UNSAVED = 256
"""Paths that wait for one storage at the most."""


def put_off(state: CellState, storage: Storage, end: Node, first: int, chunks: int) -> None:
    """Chunks of the path to ``end``, from number ``first`` on, are to be saved later; where the line is full, never."""
    known = storage.disk.unsaved.get(end.id)
    if known is not None:
        storage.disk.unsaved[end.id] = min(known, first)
    elif len(storage.disk.unsaved) < MOST_UNSAVED:
        state.count("saves_put_off_chunks", chunks)
        storage.disk.unsaved[end.id] = first
    else:
        state.count("saves_refused_chunks", chunks)


def move_up(state: CellState, gone: list[Node], parent: Node | None) -> None:
    """Move up nodes that are removed, which hung below ``parent``; None was an emptied root."""
    for storage in state.storages.values():
        if not storage.disk.unsaved:
            continue
        for node in gone:
            first = storage.disk.unsaved.pop(node.id, None)
            if first is not None and parent is not None and parent.parent:
                storage.disk.unsaved[parent.id] = min(first, storage.disk.unsaved.get(parent.id, first))
