"""Policies that give every node a number, the least going first, and the one that the core needs: LRU."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, register_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.prefix_tree import Node

Rank = tuple[int | float, ...]


class RankedPolicy(Policy):
    """A heap with lazy deletion over the nodes that were offered. Subclasses say how a node ranks now.

    ``latest`` is the rank that each node was last offered with; other entries of its id are void. A rank may rise
    unnoticed, because what comes to the top is ranked again; one that falls must be offered anew to be found.
    """

    entries: list[tuple[Rank, int]] = []
    latest: dict[int, Rank] = {}

    def rank(self, node: Node) -> Rank:
        """Where the node stands now; the least is evicted first. Does not mutate."""
        raise NotImplementedError

    def remove(self, node: Node, moment: Moment) -> None:
        self.latest.pop(node.id, None)

    def offer(self, node: Node) -> None:
        rank = self.rank(node)
        if self.latest.get(node.id) == rank:
            return
        self.latest[node.id] = rank
        heappush(self.entries, (rank, node.id))
        if len(self.entries) > 2 * len(self.latest) + 64:
            self.entries = [(latest, known) for known, latest in self.latest.items()]
            heapify(self.entries)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        while self.entries:
            rank, node_id = heappop(self.entries)
            if self.latest.get(node_id) != rank:
                continue  # It was offered again since, with another rank, or it is gone.
            del self.latest[node_id]
            node = evictable(node_id)
            if node is None:
                continue  # It is offered again when it becomes evictable.
            now = self.rank(node)
            if now == rank:
                return node
            self.offer(node)
        return None

    def share_numbers(self, nodes: Mapping[int, Node]) -> None:
        """Hold each id and each rank once, where decoding made two of them: 200 bytes for each node on offer."""
        ids = {node_id: nodes[node_id].id if node_id in nodes else node_id for node_id in self.latest}
        self.latest = {ids[node_id]: rank for node_id, rank in self.latest.items()}
        entries = []
        for rank, node_id in self.entries:
            latest = self.latest.get(node_id)
            entries.append((latest if latest is not None and latest == rank else rank, ids.get(node_id, node_id)))
        self.entries = entries


@register_policy
class LruPolicy(RankedPolicy):
    """Ranks by the sequence number of the input that last used a node."""

    name = "lru"

    def rank(self, node: Node) -> Rank:
        return (node.last_use,)
