"""2Q (Johnson and Shasha, VLDB 1994), the full version: a queue for newcomers, an LRU for nodes used again later.

A newcomer stays in ``recent`` for a while, used or not. It is then evicted, and only a use soon after that, while
its digest is still in ``ghosts``, brings it to ``main``. So a burst of uses, which says little, protects nothing.

A newcomer whose time is over cannot go while it has children. It then waits in ``passed``, where it is treated as the
ghost that it ought to be: a use brings it to ``main``, otherwise it goes as soon as it may.
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

RECENT_SHARE = 0.25  # Share of the capacity for newcomers: the paper's Kin.
GHOST_SHARE = 0.5  # Tokens of ghosts as a share of the capacity: the paper's Kout.


@register_policy
class TwoQueuePolicy(QueuedPolicy):
    """2Q. The paper's A1in is ``recent``, A1out is ``ghosts`` and Am is ``main``."""

    name = "2q"

    recent: ScannedQueue = msgspec.field(default_factory=ScannedQueue)
    passed: NodeQueue = msgspec.field(default_factory=NodeQueue)
    main: NodeQueue = msgspec.field(default_factory=NodeQueue)
    ghosts: GhostList = msgspec.field(default_factory=GhostList)

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return the main queue, the nodes that the newcomers' queue passed over, and the newcomers."""
        return (self.main, self.passed, self.recent)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Move reused nodes of ``main`` and ``passed`` to the back of ``main``; newcomers stay in their place."""
        for node in reversed(path):
            if node.id in self.main.places:
                self.main.renew(node.id)
            elif node.id in self.passed.places:
                move(node.id, self.passed, self.main)

    def add(self, node: Node, moment: Moment) -> None:
        """Append a newcomer to ``recent``, or to ``main`` if it is a ghost."""
        queue = self.main if self.ghosts.take(node.digest) else self.recent
        queue.append(node.id, size_of(node))

    def remove(self, node: Node, moment: Moment) -> None:
        """Take the node out of its queue; unless that is ``main``, remember it as a ghost."""
        size = self.recent.take_out(node.id) or self.passed.take_out(node.id)
        if size:
            self.ghosts.put(node.digest, size, self.capacity * GHOST_SHARE)
        else:
            self.main.take_out(node.id)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return a node that waits in ``passed``, else the oldest newcomer where ``recent`` is above its share.

        Otherwise it is the least recently used evictable node of ``main``, or the oldest evictable newcomer.
        """
        overdue = self.passed.first_evictable(evictable)
        if overdue is not None:
            return overdue
        while self.recent.tokens > self.capacity * RECENT_SHARE:
            oldest = self.recent.front()
            assert oldest is not None
            node = evictable(oldest)
            if node is not None:
                return node
            move(oldest, self.recent, self.passed)
        return self.main.first_evictable(evictable) or self.recent.first_evictable(evictable)
