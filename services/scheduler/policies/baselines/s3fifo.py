"""S3-FIFO (Yang et al., SOSP 2023): a small queue filters what is used once, a main queue holds the rest.

A newcomer enters the small queue, or the main one if its digest is still in ``ghosts``. Used twice or more by the
time it comes to the small queue's front, it moves to the main queue; otherwise it is evicted. The main queue puts
used nodes back, once for each of up to three uses.

A node that comes to the small queue's front and cannot go, because it has children, waits in ``passed`` as the ghost
that it ought to be: a use brings it to the main queue, otherwise it goes as soon as it may. Without that, parents of
nodes in the main queue would fill the small one permanently, and the main queue would never shrink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import Evictable, Moment, register_policy, size_of
from services.scheduler.policies.baselines.queue import GhostList, NodeQueue, ScannedQueue, move
from services.scheduler.policies.baselines.queued import QueuedPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node

SMALL_SHARE = 0.1  # Of the capacity; the ghosts are as many tokens as the rest.
MOST_USES = 3
USES_TO_MOVE = 2  # Uses after arrival that bring a node from the small to the main queue.


@register_policy
class S3FifoPolicy(QueuedPolicy):
    """S3-FIFO, the paper's Algorithm 1."""

    name = "s3-fifo"

    small: ScannedQueue = msgspec.field(default_factory=ScannedQueue)
    passed: NodeQueue = msgspec.field(default_factory=NodeQueue)
    main: NodeQueue = msgspec.field(default_factory=NodeQueue)
    ghosts: GhostList = msgspec.field(default_factory=GhostList)
    uses: dict[int, int] = {}

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return the main queue, the nodes that the small queue passed over, and the small queue."""
        return (self.main, self.passed, self.small)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Count a use of each node, up to three; a node in ``passed`` moves to the main queue instead."""
        for node in reversed(path):
            if node.id in self.passed.places:
                self._to_main(node.id, self.passed)
            else:
                self.uses[node.id] = min(MOST_USES, self.uses[node.id] + 1)

    def add(self, node: Node, moment: Moment) -> None:
        """Append a newcomer to the small queue, or to the main queue if it is a ghost."""
        queue = self.main if self.ghosts.take(node.digest) else self.small
        queue.append(node.id, size_of(node))
        self.uses[node.id] = 0

    def remove(self, node: Node, moment: Moment) -> None:
        """Take the node out of its queue; unless that is the main queue, remember it as a ghost."""
        size = self.small.take_out(node.id) or self.passed.take_out(node.id)
        if size:
            self.ghosts.put(node.digest, size, self.capacity * (1 - SMALL_SHARE))
        else:
            self.main.take_out(node.id)
        self.uses.pop(node.id, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper part the place and the uses of the whole."""
        super().split(upper, lower)
        self.uses[upper.id] = self.uses[lower.id]

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return a node that waits in ``passed``, else the small queue's front where that is above its share.

        Otherwise it is the first node of the main queue without uses left, or the oldest evictable one of the small
        queue.
        """
        overdue = self.passed.first_evictable(evictable)
        if overdue is not None:
            return overdue
        while self.small.tokens >= self.capacity * SMALL_SHARE:
            oldest = self.small.front()
            if oldest is None:
                break
            if self.uses[oldest] >= USES_TO_MOVE:
                self._to_main(oldest, self.small)
                continue
            node = evictable(oldest)
            if node is not None:
                return node
            move(oldest, self.small, self.passed)
        return self._main_victim(evictable) or self.small.first_evictable(evictable)

    def _main_victim(self, evictable: Evictable) -> Node | None:
        while (node := self.main.first_evictable(evictable)) is not None:
            if not self.uses[node.id]:
                return node
            self.uses[node.id] -= 1
            self.main.renew(node.id)
            self.main.offer(node.id)
        return None

    def _to_main(self, node_id: int, source: NodeQueue) -> None:
        move(node_id, source, self.main)
        self.uses[node_id] = 0
