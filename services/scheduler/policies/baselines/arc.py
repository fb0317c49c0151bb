"""ARC (Megiddo and Modha, FAST 2003): recency and frequency share the pool as their ghosts ask for it.

Nodes used once are in ``recent``, those used again in ``frequent``, both in order of use. Nodes that leave either are
remembered, and a newcomer that is remembered from one shifts ``target``, the size that ``recent`` is meant to have,
towards it.

One thing differs from the paper, because room is made before the newcomer is known: the target moves when the newcomer
arrives, not before the victim that it displaces is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import Evictable, Moment, register_policy, size_of
from services.scheduler.policies.baselines.queue import GhostList, NodeQueue, move
from services.scheduler.policies.baselines.queued import QueuedPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node


@register_policy
class ArcPolicy(QueuedPolicy):
    """ARC. The paper's T1, T2, B1 and B2 are ``recent``, ``frequent`` and their ghosts; its p is ``target``.

    ``target`` is in tokens.
    """

    name = "arc"

    recent: NodeQueue = msgspec.field(default_factory=NodeQueue)
    frequent: NodeQueue = msgspec.field(default_factory=NodeQueue)
    recent_ghosts: GhostList = msgspec.field(default_factory=GhostList)
    frequent_ghosts: GhostList = msgspec.field(default_factory=GhostList)
    target: float = 0.0

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return T1 and T2."""
        return (self.recent, self.frequent)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Move reused nodes to the back of ``frequent``, children first, so that a parent is evicted after them."""
        for node in reversed(path):
            if node.id in self.recent.places:
                move(node.id, self.recent, self.frequent)
            else:
                self.frequent.renew(node.id)

    def add(self, node: Node, moment: Moment) -> None:
        """Append a newcomer to ``recent``; one that is a ghost to ``frequent``, moving ``target`` towards its list."""
        size = size_of(node)
        once, often = self.recent_ghosts.tokens, self.frequent_ghosts.tokens
        queue = self.frequent
        if self.recent_ghosts.take(node.digest):
            self.target = min(float(self.capacity), self.target + size * max(1.0, often / once))
        elif self.frequent_ghosts.take(node.digest):
            self.target = max(0.0, self.target - size * max(1.0, once / often))
        else:
            queue = self.recent
        queue.append(node.id, size)
        self._trim()

    def remove(self, node: Node, moment: Moment) -> None:
        """Remember the node as a ghost of the queue that it leaves."""
        if size := self.recent.take_out(node.id):
            self.recent_ghosts.put(node.digest, size, self.capacity)
        elif size := self.frequent.take_out(node.id):
            self.frequent_ghosts.put(node.digest, size, 2 * self.capacity)
        self._trim()

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the oldest evictable node of ``recent`` where that is above ``target``, else of ``frequent``.

        The other queue stands in where the first has none.
        """
        first, second = self.recent, self.frequent
        if self.recent.tokens <= self.target:
            first, second = second, first
        return first.first_evictable(evictable) or second.first_evictable(evictable)

    def _trim(self) -> None:
        """Bound ``recent`` and its ghosts by the capacity, and all four lists by twice that."""
        self.recent_ghosts.trim(max(0, self.capacity - self.recent.tokens))
        known = self.recent.tokens + self.frequent.tokens + self.recent_ghosts.tokens
        self.frequent_ghosts.trim(max(0, 2 * self.capacity - known))
