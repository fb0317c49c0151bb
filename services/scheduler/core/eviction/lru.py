"""Least recently used: what no request has touched for longest goes first."""

from __future__ import annotations

from services.scheduler.core.eviction.policy import Priority
from services.scheduler.core.prefix_tree import Node


class LruPolicy:
    """Orders by the sequence number of the input that last used a node."""

    name = "lru"

    def priority(self, node: Node) -> Priority:
        return (node.last_use,)
