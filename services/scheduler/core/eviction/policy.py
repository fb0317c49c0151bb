"""The protocol of an eviction policy."""

from __future__ import annotations

from typing import Protocol

from services.scheduler.core.prefix_tree import Node

Priority = tuple[int, ...]


class EvictionPolicy(Protocol):
    """Orders nodes for eviction. Pure: what it answers depends on the node alone, in logical time.

    Which nodes may be evicted at all is not its business (see :mod:`residency`).
    """

    name: str

    def priority(self, node: Node) -> Priority:
        """The node with the least priority goes first; ties go by node id. Does not mutate."""
