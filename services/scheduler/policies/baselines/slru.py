"""Segmented LRU (Karedla, Love and Wherry 1994): nodes used twice are protected from nodes used once.

A newcomer is on probation. Its next use protects it, and the least recently used protected node goes back on probation
when the protected part outgrows its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import Evictable, Moment, register_policy, size_of
from services.scheduler.policies.baselines.queue import NodeQueue, ScannedQueue, move
from services.scheduler.policies.baselines.queued import QueuedPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node

PROTECTED_SHARE = 0.8


class Segments(msgspec.Struct):
    """The two segments, probation and protected; also the main part of :mod:`w_tinylfu`."""

    probation: NodeQueue = msgspec.field(default_factory=NodeQueue)
    protected: ScannedQueue = msgspec.field(default_factory=ScannedQueue)

    @property
    def tokens(self) -> int:
        """Size of both segments in tokens."""
        return self.probation.tokens + self.protected.tokens

    def use(self, node_id: int, most_protected: float) -> None:
        """Protect a member, at the back; the oldest protected ones beyond ``most_protected`` tokens go on probation."""
        if node_id in self.protected.places:
            self.protected.renew(node_id)
            return
        move(node_id, self.probation, self.protected)
        while self.protected.tokens > most_protected:
            oldest = self.protected.front()
            assert oldest is not None
            move(oldest, self.protected, self.probation)

    def first_evictable(self, evictable: Evictable) -> Node | None:
        """Return the least recently used evictable node on probation, else a protected one, else None.

        See :meth:`NodeQueue.first_evictable`.
        """
        return self.probation.first_evictable(evictable) or self.protected.first_evictable(evictable)


@register_policy
class SlruPolicy(QueuedPolicy):
    """Evicts the least recently used node on probation, and a protected one only when there is no other."""

    name = "slru"

    segments: Segments = msgspec.field(default_factory=Segments)

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return the nodes on probation and the protected ones."""
        return (self.segments.probation, self.segments.protected)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Protect reused nodes, children first."""
        # Bottom up, so that a parent counts as used after its children and is not demoted before them.
        for node in reversed(path):
            self.segments.use(node.id, self.capacity * PROTECTED_SHARE)

    def add(self, node: Node, moment: Moment) -> None:
        """Put a newcomer on probation."""
        self.segments.probation.append(node.id, size_of(node))

    def remove(self, node: Node, moment: Moment) -> None:
        """Take the node out of its segment; no ghost is kept."""
        for queue in self.queues():
            queue.take_out(node.id)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the least recently used evictable node on probation, else a protected one."""
        return self.segments.first_evictable(evictable)
