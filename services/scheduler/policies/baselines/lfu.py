"""Least frequently used: the node with the fewest uses since it became resident goes first, then the least recent.

A node that leaves and comes back starts anew; :mod:`hotprefix` is the policy whose counts outlive an eviction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction import Rank, RankedPolicy, register_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.eviction import Moment
    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class LfuPolicy(RankedPolicy):
    """Ranks by uses, then by the last one. Both only rise, as :class:`RankedPolicy` needs."""

    name = "lfu"

    uses: dict[int, int] = {}

    def rank(self, node: Node) -> Rank:
        """Return the number of uses, then the last use."""
        return (self.uses[node.id], node.last_use)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Count one more use of each node."""
        for node in path:
            self.uses[node.id] += 1

    def add(self, node: Node, moment: Moment) -> None:
        """Count the newcomer's first use."""
        self.uses[node.id] = 1

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget the node's uses: a node that comes back is new."""
        super().remove(node, moment)
        self.uses.pop(node.id, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper part the uses of the whole."""
        self.uses[upper.id] = self.uses[lower.id]
