"""Queues of resident nodes, and ghosts of nodes that left: the parts of policies that are made of queues.

Only leaves can go, and most nodes of a prefix tree are not leaves. So a queue keeps two orders: the place of every
member, and a heap of only those members that were offered for eviction, in order of their places. A node that may not
go keeps its place and costs nothing until it is offered.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.scheduler.core.cache.eviction import Evictable
    from services.scheduler.core.cache.prefix_tree import Node

_SPARE = 64  # Void entries that a small heap may hold before it is built anew.

Entry = tuple[int, int]
"""A place and the id of the node that has it."""


class NodeQueue(msgspec.Struct):
    """Nodes in order of a number that each gets when it joins or is moved to the back. Sizes are tokens."""

    places: dict[int, int] = {}
    sizes: dict[int, int] = {}
    tokens: int = 0
    last: int = 0  # The last place that was assigned.
    offered: dict[int, int] = {}  # Place with which a member is in ``heap``; other entries of its id are void.
    heap: list[Entry] = []

    def append(self, node_id: int, size: int) -> None:
        """Append a node that is not a member at the back; it is not on offer."""
        self.last += 1
        self.places[node_id] = self.last
        self.sizes[node_id] = size
        self.tokens += size

    def renew(self, node_id: int) -> None:
        """Move a member to the back. It stays on offer if it was."""
        self.last += 1
        self.places[node_id] = self.last
        if node_id in self.offered:
            self.offer(node_id)

    def take_out(self, node_id: int) -> int:
        """Remove a node; return its size in tokens, or 0 when it was not a member."""
        if self.places.pop(node_id, None) is None:
            return 0
        size = self.sizes.pop(node_id)
        self.tokens -= size
        self.offered.pop(node_id, None)
        return size

    def split(self, upper: Node, lower: Node, upper_size: int) -> None:
        """Note that the member ``lower`` was cut: both parts have its place."""
        self.places[upper.id] = self.places[lower.id]
        self.sizes[upper.id] = upper_size
        self.sizes[lower.id] -= upper_size

    def offer(self, node_id: int) -> None:
        """Offer a member for eviction at its present place. Repeats are harmless."""
        place = self.places[node_id]
        if self.offered.get(node_id) == place:
            return
        self.offered[node_id] = place
        heappush(self.heap, (place, node_id))
        if len(self.heap) > 2 * len(self.offered) + _SPARE:
            self.heap = [(held, known) for known, held in self.offered.items()]
            heapify(self.heap)

    def first_evictable(self, evictable: Evictable) -> Node | None:
        """Return the frontmost member that may go, or None. It stays a member but is on offer no longer."""
        while self.heap:
            place, node_id = heappop(self.heap)
            if self.offered.get(node_id) != place:
                continue
            del self.offered[node_id]
            node = evictable(node_id)
            if node is not None:
                return node
        return None


class ScannedQueue(NodeQueue):
    """A queue that also knows its frontmost member, whether that may go or not."""

    order: list[Entry] = []

    def append(self, node_id: int, size: int) -> None:
        """Append a node, and enter it in the order of all members."""
        super().append(node_id, size)
        self._enter(node_id)

    def renew(self, node_id: int) -> None:
        """Move a member to the back, in the order of all members too."""
        super().renew(node_id)
        self._enter(node_id)

    def split(self, upper: Node, lower: Node, upper_size: int) -> None:
        """Note a cut: ``upper`` gets the place of ``lower``, in the order of all members too."""
        super().split(upper, lower, upper_size)
        self._enter(upper.id)

    def front(self) -> int | None:
        """Return the id of the frontmost member, or None when there is none."""
        while self.order:
            place, node_id = self.order[0]
            if self.places.get(node_id) == place:
                return node_id
            heappop(self.order)
        return None

    def _enter(self, node_id: int) -> None:
        heappush(self.order, (self.places[node_id], node_id))
        if len(self.order) > 2 * len(self.places) + _SPARE:
            self.order = [(place, known) for known, place in self.places.items()]
            heapify(self.order)


def move(node_id: int, source: NodeQueue, target: NodeQueue) -> None:
    """Move a member of ``source`` to the back of ``target``, on offer if it was."""
    is_offered = node_id in source.offered
    target.append(node_id, source.take_out(node_id))
    if is_offered:
        target.offer(node_id)


class GhostList(msgspec.Struct):
    """Ghosts: digests and sizes of nodes that left, oldest first, of at most as many tokens as the caller allows."""

    sizes: dict[int, int] = {}
    numbers: dict[int, int] = {}
    order: list[Entry] = []  # (number, digest) from ``start`` on; void where ``numbers`` says otherwise.
    start: int = 0
    last: int = 0
    tokens: int = 0

    def put(self, digest: int, size: int, most_tokens: float) -> None:
        """Remember a node as the newest; forget the oldest beyond ``most_tokens``."""
        self.take(digest)
        self.last += 1
        self.sizes[digest] = size
        self.numbers[digest] = self.last
        self.order.append((self.last, digest))
        self.tokens += size
        self.trim(most_tokens)

    def take(self, digest: int) -> int:
        """Forget a node; return the size that it had, or 0 when it was not remembered."""
        size = self.sizes.pop(digest, 0)
        if size:
            del self.numbers[digest]
            self.tokens -= size
        return size

    def trim(self, most_tokens: float) -> None:
        """Forget the oldest until no more than ``most_tokens`` are remembered."""
        while self.tokens > most_tokens:
            number, digest = self.order[self.start]
            self.start += 1
            if self.numbers.get(digest) == number:
                self.take(digest)
        if len(self.order) > 2 * len(self.sizes) + _SPARE:
            self.order = [entry for entry in self.order[self.start :] if self.numbers.get(entry[1]) == entry[0]]
            self.start = 0
