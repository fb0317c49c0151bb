"""SIEVE (Zhang et al., NSDI 2024): a hand goes over the nodes in order of arrival and spares used ones.

The hand clears the mark of a used node and evicts an unmarked one; nodes never move. Here no mark is kept, only
when the hand will evict a node: in which round, at which arrival number. A newcomer is due when the hand first
comes to it, and a used node one round after the hand comes to it next, which is the same order. A node that may not
go when the hand comes, because it has children, is passed over and due a round later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction import Rank, RankedPolicy, register_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.eviction import Evictable, Moment
    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class SievePolicy(RankedPolicy):
    """Ranks by the (round, arrival) at which a node is due, which only rises. ``hand`` is the hand's position."""

    name = "sieve"

    due: dict[int, tuple[int, int]] = {}
    hand: tuple[int, int] = (0, 0)
    last: int = 0  # The last arrival number that was assigned.

    def rank(self, node: Node) -> Rank:
        """Return the (round, arrival) at which the hand evicts the node."""
        return self.due[node.id]

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Spare each node once: it is due one round after the hand comes to it next."""
        for node in path:
            arrival = self.due[node.id][1]
            self.due[node.id] = (self._coming(arrival) + 1, arrival)

    def add(self, node: Node, moment: Moment) -> None:
        """Append the node behind all others; it is due when the hand first comes to it."""
        self.last += 1
        self.due[node.id] = (self.hand[0], self.last)

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget when the node was due: a node that comes back is new."""
        super().remove(node, moment)
        self.due.pop(node.id, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Make the upper part due with the lower one."""
        self.due[upper.id] = self.due[lower.id]

    def offer(self, node: Node) -> None:
        """Offer the node; one that the hand has passed meanwhile is due when it comes again."""
        due = self.due[node.id]
        if due < self.hand:
            # The hand has passed it meanwhile.
            self.due[node.id] = (self._coming(due[1]), due[1])
        super().offer(node)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the node that is due first, and move the hand to it."""
        node = super().victim(evictable, moment)
        if node is not None:
            current, arrival = max(self.hand, self.due[node.id])
            # From the newest node the hand goes on at the oldest, in a new round.
            self.hand = (current + 1, 0) if arrival == self.last else (current, arrival)
        return node

    def _coming(self, arrival: int) -> int:
        """Return the round in which the hand comes to a node next."""
        current, position = self.hand
        return current if arrival > position else current + 1
