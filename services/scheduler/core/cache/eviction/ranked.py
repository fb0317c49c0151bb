"""Base of policies that give every node a number and evict the least, and the policy that the core needs: LRU."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import isnan
from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, register_policy
from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.prefix_tree import Node

Rank = tuple[int | float, ...]


class RankedPolicy(Policy):
    """A heap with lazy deletion over the nodes that were offered. Subclasses define :meth:`rank`.

    ``latest`` is the rank that each node was last offered with; other entries of its id are void. A rank may rise
    unnoticed, because a node that comes to the top is ranked again; one whose rank falls must be offered again.
    """

    entries: list[tuple[Rank, int]] = []
    latest: dict[int, Rank] = {}

    def rank(self, node: Node) -> Rank:
        """Return the node's present rank; the least is evicted first. Changes nothing."""
        raise NotImplementedError

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget the node's rank; its entries in the heap become void."""
        self.latest.pop(node.id, None)

    def offer(self, node: Node) -> None:
        """Push the node's present rank; rebuild the heap once more than half of its entries are void.

        Raises InvariantViolated for a rank that is not a tuple of numbers, or holds NaN: such a node would never leave.
        """
        rank = self.rank(node)
        known = self.latest.get(node.id)
        if known is not None and known == rank:
            return
        _require_numbers(self, node, rank)
        self.latest[node.id] = rank
        heappush(self.entries, (rank, node.id))
        if len(self.entries) > 2 * len(self.latest) + 64:
            self.entries = [(latest, known) for known, latest in self.latest.items()]
            heapify(self.entries)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the evictable node of least rank, or None; a node whose rank changed meanwhile is pushed again."""
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
        """Keep one object for each id and rank, where decoding made two: saves 200 bytes for each offered node."""
        ids = {node_id: nodes[node_id].id if node_id in nodes else node_id for node_id in self.latest}
        self.latest = {ids[node_id]: rank for node_id, rank in self.latest.items()}
        entries = []
        for rank, node_id in self.entries:
            latest = self.latest.get(node_id)
            entries.append((latest if latest is not None and latest == rank else rank, ids.get(node_id, node_id)))
        self.entries = entries


def _require_numbers(policy: RankedPolicy, node: Node, rank: object) -> None:
    for each in rank if isinstance(rank, tuple) else (None,):
        if not (isinstance(each, int) or (isinstance(each, float) and not isnan(each))):
            raise InvariantViolated(
                f"policy {policy.name!r} ranks node {node.id} as {rank!r}; a rank is a tuple of numbers, not NaN"
            )


@register_policy
class LruPolicy(RankedPolicy):
    """Least recently used first, by the sequence number of the input that last used a node."""

    name = "lru"

    def rank(self, node: Node) -> Rank:
        """Return the sequence number of the input that last used the node."""
        return (node.last_use,)
