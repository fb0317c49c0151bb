"""Per-pool queues of nodes that may be evicted, in the policy's order.

The queues are derived from the tree: which victim comes out depends only on the nodes, never on how often or in
what order they were offered, so a snapshot leaves them out and recovery builds them again.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from services.scheduler.core.eviction.policy import Priority


class _Heap:
    """A heap with lazy deletion. ``latest`` is the priority that each node was last offered with."""

    __slots__ = ("entries", "latest")

    def __init__(self) -> None:
        self.entries: list[tuple[Priority, int]] = []
        self.latest: dict[int, Priority] = {}


class VictimQueues:
    """One queue for each pool, keyed by tier and owner."""

    __slots__ = ("_heaps",)

    def __init__(self) -> None:
        self._heaps: dict[tuple[str, str], _Heap] = {}

    def offer(self, tier: str, owner: str, node_id: int, priority: Priority) -> None:
        """Say that a node is evictable with this priority; repeated offers are cheap."""
        heap = self._heaps.get((tier, owner))
        if heap is None:
            heap = self._heaps[tier, owner] = _Heap()
        if heap.latest.get(node_id) == priority:
            return
        heap.latest[node_id] = priority
        heappush(heap.entries, (priority, node_id))
        if len(heap.entries) > 2 * len(heap.latest) + 64:
            heap.entries = [(latest, known) for known, latest in heap.latest.items()]
            heapify(heap.entries)

    def take(self, tier: str, owner: str, current: Callable[[int], Priority | None]) -> int | None:
        """Remove and return the node with the least priority, or None when no node is evictable.

        ``current`` answers a node's priority now, or None when it may not be evicted (any more).
        """
        heap = self._heaps.get((tier, owner))
        while heap is not None and heap.entries:
            priority, node_id = heappop(heap.entries)
            if heap.latest.get(node_id) != priority:
                continue  # It was offered again since, with another priority.
            del heap.latest[node_id]
            now = current(node_id)
            if now == priority:
                return node_id
            if now is not None:
                self.offer(tier, owner, node_id, now)
        return None

    def forget(self, tier: str, owner: str) -> None:
        """Drop a pool's queue."""
        self._heaps.pop((tier, owner), None)

    def clear(self) -> None:
        """Drop every queue."""
        self._heaps.clear()
