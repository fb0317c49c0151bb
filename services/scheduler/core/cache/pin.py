"""A prefix that is to be kept: plain data of a snapshot (see :mod:`pins`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.prefix_tree import ancestors, namespace_of

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Storage


class Pin(msgspec.Struct):
    """A prefix that is to be kept: a host lock on every node from the root to ``node`` at this storage.

    ``node`` is 0 while nothing of it is held. ``refusal`` says why nothing is and nothing will be.
    """

    pin_id: str
    storage_id: str
    namespace: str
    prefix: bytes  # Its tokens, packed.
    expires_ns: int
    timer_id: str
    node: int = 0
    pages: int = 0  # Host pages that it holds.
    chunks: bytes = b""  # What the storage was told to keep on its disk.
    refusal: str = ""


def is_wanted(state: CellState, storage: Storage, node: Node) -> bool:
    """Whether a pin of this storage asks for the node, which then gets a copy whatever admission says of it.

    Does not mutate.
    """
    pins = [pin for pin in state.pins.values() if pin.storage_id == storage.storage_id]
    if not pins:
        return False
    path = b"".join(above.tokens for above in reversed(ancestors(state.tree, node)))
    namespace = namespace_of(state.tree, node)
    return any(pin.namespace == namespace and pin.prefix.startswith(path) for pin in pins)


def pinned_pages(state: CellState, storage_id: str) -> int:
    """Host pages that pins hold in this pool; a page of two pins counts twice. Does not mutate."""
    return sum(pin.pages for pin in state.pins.values() if pin.storage_id == storage_id)
