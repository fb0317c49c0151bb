"""GreedyDual-Size-Frequency (Cherkasova 1998): uses per token, on a clock that rises with what was evicted.

A node's priority is the clock at its last use plus uses divided by tokens (the paper's formula with cost 1, its
variant for the hit ratio of objects). The clock is the priority of the last victim, so a node that has not been used
for long falls behind newcomers however often it was used before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction import Evictable, Moment, Rank, RankedPolicy, register_policy, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class GdsfPolicy(RankedPolicy):
    """Ranks by that priority, then by the last use. A priority rises with uses and with a split, and never falls."""

    name = "gdsf"

    uses: dict[int, int] = {}
    clock_at_use: dict[int, float] = {}
    clock: float = 0.0

    def rank(self, node: Node) -> Rank:
        """Return the clock at the last use plus uses per token, then the last use."""
        return (self.clock_at_use[node.id] + self.uses[node.id] / size_of(node), node.last_use)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Count a use of each node, and raise its priority by the present clock."""
        for node in path:
            self.uses[node.id] += 1
            self.clock_at_use[node.id] = self.clock

    def add(self, node: Node, moment: Moment) -> None:
        """Count the newcomer's first use, at the present clock."""
        self.uses[node.id] = 1
        self.clock_at_use[node.id] = self.clock

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget the node's uses: a node that comes back is new."""
        super().remove(node, moment)
        self.uses.pop(node.id, None)
        self.clock_at_use.pop(node.id, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper part the uses and the clock of the whole; both parts' priorities rise as they are smaller."""
        self.uses[upper.id] = self.uses[lower.id]
        self.clock_at_use[upper.id] = self.clock_at_use[lower.id]

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the node of least priority, and raise the clock to that."""
        node = super().victim(evictable, moment)
        if node is not None:
            # A parent becomes a leaf late and may then rank below the clock, which must not go back.
            self.clock = max(self.clock, float(self.rank(node)[0]))
        return node
