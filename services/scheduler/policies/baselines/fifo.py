"""First in, first out: the node that became resident first goes first, used or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction import Rank, RankedPolicy, register_policy

if TYPE_CHECKING:
    from services.scheduler.core.cache.eviction import Moment
    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class FifoPolicy(RankedPolicy):
    """Ranks by a number that is given on arrival. Both parts of a split node keep it."""

    name = "fifo"

    arrivals: dict[int, int] = {}
    last: int = 0

    def rank(self, node: Node) -> Rank:
        """Return the arrival number; uses never change it."""
        return (self.arrivals[node.id],)

    def add(self, node: Node, moment: Moment) -> None:
        """Give the node the next arrival number."""
        self.last += 1
        self.arrivals[node.id] = self.last

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget the arrival number: a node that comes back is new."""
        super().remove(node, moment)
        self.arrivals.pop(node.id, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper part the arrival number of the whole."""
        self.arrivals[upper.id] = self.arrivals[lower.id]
