"""Least recently used: what no request has touched for longest goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction.ranked import Rank, RankedPolicy
from services.scheduler.core.cache.eviction.registry import register_policy

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class LruPolicy(RankedPolicy):
    """Ranks by the sequence number of the input that last used a node."""

    name = "lru"

    def rank(self, node: Node) -> Rank:
        return (node.last_use,)
