"""The base of policies made of a few queues; each resident node is in one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction import Policy, size_of

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.policies.baselines.queue import NodeQueue


class QueuedPolicy(Policy):
    """Base of policies made of queues, which they compare with their shares of ``capacity``, in tokens."""

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return all queues, the one that most nodes are in first."""
        raise NotImplementedError

    def queue_of(self, node_id: int) -> NodeQueue | None:
        """Return the queue that a node is in, or None when the policy does not know it."""
        for queue in self.queues():
            if node_id in queue.places:
                return queue
        return None

    def split(self, upper: Node, lower: Node) -> None:
        """Give both parts of a cut node its place in its queue."""
        queue = self.queue_of(lower.id)
        if queue is not None:
            queue.split(upper, lower, size_of(upper))

    def offer(self, node: Node) -> None:
        """Offer the node in the queue that it is in; one that the policy does not know is ignored."""
        queue = self.queue_of(node.id)
        if queue is not None:
            queue.offer(node.id)
