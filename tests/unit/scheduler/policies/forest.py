"""A naive pool of tree nodes around one policy: who is resident, who hangs below whom, who is locked.

It calls a policy as the scheduler's core does. A twin can be made of the policy from its bytes at any time; from then
on both are told everything and must answer alike.
"""

from __future__ import annotations

from typing import Any

from bench.blocks_hotness import ExactHotness
from services.scheduler.core.cache.eviction import Moment
from services.scheduler.core.cache.eviction.policy import Policy
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.labels import NARROW_BYTES
from services.scheduler.core.cache.prefix_tree import Node

MOST_RUNNING = 3


def size(node: Node) -> int:
    """Tokens of a node."""
    return node.size


class Forest:
    """Nodes by id; a parent of 0 is none."""

    def __init__(self, policy: Policy) -> None:
        self.policies = [policy]
        self.hotness = ExactHotness(max_age=3, aging_requests=4)
        self.nodes: dict[int, Node] = {}
        self.locks: dict[int, int] = {}
        self.running: list[Any] = []
        self.last_id = self.seq = 0

    @property
    def policy(self) -> Policy:
        return self.policies[0]

    def snapshot(self) -> None:
        """Make the twin anew from the policy's bytes."""
        data = self.policy.encode()
        twin = type(self.policy).decode(data)
        assert twin == self.policy
        assert twin.encode() == data
        twin.share_numbers(self.nodes)
        assert twin.encode() == data
        self.policies = [self.policy, twin]

    # What is so.

    def moment(self) -> Moment:
        return Moment(self.seq, self.seq * 1000, self.seq, self.hotness)

    def children(self, node: Node) -> list[Node]:
        return [child for child in self.nodes.values() if child.parent == node.id]

    def path(self, node: Node) -> list[Node]:
        """From the top down to the node."""
        found = [node]
        while found[0].parent:
            found.insert(0, self.nodes[found[0].parent])
        return found

    def evictable(self, node_id: int) -> Node | None:
        node = self.nodes.get(node_id)
        return None if node is None or self.locks.get(node_id) or self.children(node) else node

    def all_evictable(self) -> list[Node]:
        return [node for node in self.nodes.values() if self.evictable(node.id)]

    def tokens(self) -> int:
        return sum(size(node) for node in self.nodes.values())

    # What happens.

    def tell(self, name: str, *arguments: int | Moment | Node | list[Node]) -> None:
        for policy in self.policies:
            getattr(policy, name)(*arguments)

    def offer(self, node: Node) -> None:
        if self.evictable(node.id):
            self.tell("offer", node)

    def ask(self, deepest: Node | None, labels: list[int]) -> None:
        """A request reuses the path to a node, or nothing, adds a node for each label below, and runs on."""
        self.seq += 1
        path = self.path(deepest) if deepest else []
        for node in path:
            node.last_use = self.seq
            self.offer(node)
        self.hotness.admitted([node.digest for node in path])
        self.tell("visit", path, sum(map(size, path)), self.moment())
        self._change_locks(path, 1)
        parent = path[-1] if path else None
        for label in labels:
            parent = self._add(parent, label) or parent
        self.running.append(parent)
        if len(self.running) > MOST_RUNNING:
            self.finish(0)

    def _add(self, parent: Node | None, label: int) -> Node | None:
        digest = ((parent.digest if parent else 1) * 31 + label + 7) % 2**61
        if any(node.digest == digest for node in self.nodes.values()):
            return None
        self.last_id += 1
        node = Node(self.last_id, parent.id if parent else 0, bytes(NARROW_BYTES * (1 + label % 4)))
        node.record = written(digest, digest)
        node.last_use = self.seq
        self.nodes[node.id] = node
        self.locks[node.id] = 1
        self.hotness.inserted(digest, 1)
        self.tell("add", node, self.moment())
        return node

    def finish(self, index: int) -> None:
        """A running request ends."""
        deepest = self.running.pop(index)
        if deepest is not None:
            path = self.path(deepest)
            self._change_locks(path, -1)
            for node in reversed(path):
                self.offer(node)

    def _change_locks(self, path: list[Node], change: int) -> None:
        for node in path:
            self.locks[node.id] = self.locks.get(node.id, 0) + change

    def split(self, node: Node) -> Node | None:
        """Cut off the first token of a node of several, as the core does; returns the new upper part."""
        if size(node) < 2:
            return None
        self.last_id += 1
        upper = Node(self.last_id, node.parent, node.label[:NARROW_BYTES], last_use=node.last_use)
        # A node may be cut several times, and no two parts end alike.
        upper.record = written(*((each * 17 + 3 + upper.id) % 2**61 for each in (node.digest, node.end_digest)))
        node.label = node.label[NARROW_BYTES:]
        node.parent = upper.id
        self.nodes[upper.id] = upper
        self.locks[upper.id] = self.locks.get(node.id, 0)
        frequency, _ = self.hotness.lookup(node.digest)
        for _ in range(frequency):
            self.hotness.inserted(upper.digest, 1)
        self.tell("split", upper, node)
        self.offer(upper)
        self.offer(node)
        return upper

    def victim(self) -> Node | None:
        """What the policy and its twin name, which must be the same and a leaf that nothing locks."""
        expected = self.all_evictable()
        named = [policy.victim(self.evictable, self.moment()) for policy in self.policies]
        assert all(node is named[0] for node in named)
        if named[0] is None:
            assert not expected
        else:
            assert named[0].id in [node.id for node in expected]
        return named[0]

    def drop(self, node: Node) -> None:
        """A node leaves the pool."""
        del self.nodes[node.id]
        self.locks.pop(node.id, None)
        self.tell("remove", node, self.moment())
        if node.parent:
            self.offer(self.nodes[node.parent])
