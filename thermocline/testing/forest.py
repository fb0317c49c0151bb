"""A naive pool of tree nodes around one policy: resident nodes, their parents and locks.

It calls a policy as the scheduler's core does. A twin of the policy can be made from its bytes at any time; from then
on both get every call and must answer alike.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.scheduler.core.cache.eviction import Evictable, Moment
from services.scheduler.core.cache.eviction.policy import Policy
from services.scheduler.core.cache.holdings import written
from services.scheduler.core.cache.labels import NARROW_BYTES
from services.scheduler.core.cache.prefix_tree import Node
from thermocline.testing.broken import require
from thermocline.testing.exact_hotness import ExactHotness

MOST_RUNNING = 3

_SPREAD = 0x9E3779B97F4A7C15  # Digests are as large as those of real prefixes.
_ASKED, _ASKED_A_NODE = 64, 16
"""Most calls of ``evictable`` in one ``victim``: a fixed number, and so many per node."""


def size(node: Node) -> int:
    """Return the number of a node's tokens."""
    return node.size


def digest_below(above: int, label: int) -> int:
    """Return the digest of a node with ``label`` below one with the digest ``above``; 1 stands for the root."""
    return (above * 31 + label + 7) * _SPREAD % 2**61


class Forest:
    """A pool of nodes by id and the policy that manages it; a parent of 0 is none."""

    def __init__(self, policy: Policy) -> None:
        """Begin with no nodes; ``policy`` must be new, because it is told only of this pool's events."""
        self.policies = [policy]
        self.hotness = ExactHotness(max_age=3, aging_requests=4)
        self.nodes: dict[int, Node] = {}
        self.locks: dict[int, int] = {}
        self.running: list[Any] = []
        self.last_id = self.seq = 0
        self._children: dict[int, dict[int, Node]] = {}
        self._digests: dict[int, None] = {}

    @property
    def policy(self) -> Policy:
        """The policy, without its twin."""
        return self.policies[0]

    def snapshot(self) -> None:
        """Replace the twin by one from the policy's bytes. Raises ContractBroken where it is not equal."""
        name, data = self.policy.name, self.policy.encode()
        require(isinstance(data, bytes), f"{name}: encode() gives {type(data).__name__}, not bytes")
        require(self.policy.encode() == data, f"{name}: encode() gives other bytes the second time")
        twin = type(self.policy).decode(data)
        require(twin == self.policy, f"{name}: what decode() reads is not equal to what encode() wrote")
        require(twin.encode() == data, f"{name}: what decode() reads is encoded to other bytes")
        twin.share_numbers(self.nodes)
        require(twin.encode() == data, f"{name}: share_numbers() changes what is encoded")
        self.policies = [self.policy, twin]

    # Queries.

    def moment(self) -> Moment:
        """Return the moment that policies get: sequence number, time and hotness."""
        return Moment(self.seq, self.seq * 1000, self.seq, self.hotness)

    def children(self, node: Node) -> list[Node]:
        """Return the children of a node."""
        return list(self._children.get(node.id, {}).values())

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the top down to this one."""
        found = [node]
        while found[-1].parent:
            found.append(self.nodes[found[-1].parent])
        return found[::-1]

    def evictable(self, node_id: int) -> Node | None:
        """Return the node if it may leave now: it is resident, not locked, and a leaf. Else return None."""
        node = self.nodes.get(node_id)
        return None if node is None or self.locks.get(node_id) or self._children.get(node_id) else node

    def all_evictable(self) -> list[Node]:
        """Return every node that may leave now."""
        return [node for node in self.nodes.values() if self.evictable(node.id)]

    def tokens(self) -> int:
        """Return the number of tokens of all nodes."""
        return sum(size(node) for node in self.nodes.values())

    # Events.

    def tell(self, name: str, *arguments: int | Moment | Node | list[Node]) -> None:
        """Call a method of the policy and of its twin. Raises ContractBroken where one changes a node."""
        nodes = [each for each in arguments if isinstance(each, Node)]
        nodes += [node for each in arguments if isinstance(each, list) for node in each]
        before = msgspec.msgpack.encode(nodes)
        for policy in self.policies:
            getattr(policy, name)(*arguments)
        require(msgspec.msgpack.encode(nodes) == before, f"{self.policy.name}: {name}() changes a node")

    def offer(self, node: Node) -> None:
        """Offer a node, if it may leave."""
        if self.evictable(node.id):
            self.tell("offer", node)

    def ask(self, deepest: Node | None, labels: list[int]) -> None:
        """Run a request that reuses the path to ``deepest``, if given, and adds a chain of nodes, one per label."""
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
        digest = digest_below(parent.digest if parent else 1, label)
        if digest in self._digests:
            return None
        self.last_id += 1
        node = Node(self.last_id, parent.id if parent else 0, bytes(NARROW_BYTES * (1 + label % 4)))
        node.record = written(digest, digest)
        node.last_use = self.seq
        self._enter(node)
        self.locks[node.id] = 1
        self.hotness.inserted(digest, 1)
        self.tell("add", node, self.moment())
        return node

    def _enter(self, node: Node) -> None:
        self.nodes[node.id] = node
        self._digests[node.digest] = None
        self._children.setdefault(node.parent, {})[node.id] = node

    def finish(self, index: int) -> None:
        """End the running request ``index`` and unlock its path."""
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
        """Split a node after its first token, as the core does; return the new upper part, None for a single token."""
        if size(node) < 2:
            return None
        self.last_id += 1
        upper = Node(self.last_id, node.parent, node.label[:NARROW_BYTES], last_use=node.last_use)
        del self._digests[node.digest], self._children[node.parent][node.id]
        # A node may be cut several times, and no two parts end alike.
        upper.record = written(*((each * 17 + 3 + upper.id) % 2**61 for each in (node.digest, node.end_digest)))
        node.label = node.label[NARROW_BYTES:]
        node.parent = upper.id
        self._enter(upper)
        self._enter(node)
        self.locks[upper.id] = self.locks.get(node.id, 0)
        frequency, _ = self.hotness.lookup(node.digest)
        for _ in range(frequency):
            self.hotness.inserted(upper.digest, 1)
        self.tell("split", upper, node)
        self.offer(upper)
        self.offer(node)
        return upper

    def victim(self) -> Node | None:
        """Return the victim of the policy and its twin.

        Raises ContractBroken where they differ, where the victim may not leave, where there is none although a node may
        leave, and where the call does not end.
        """
        name = self.policy.name
        named = [policy.victim(self._asked(), self.moment()) for policy in self.policies]
        require(
            all(node is named[0] for node in named),
            f"{name}: the policy names {_shown(named[0])}, and what was read from its bytes {_shown(named[-1])}",
        )
        victim = named[0]
        if victim is None:
            left = [node.id for node in self.all_evictable()]
            require(not left, f"{name}: names none although nodes {left[:8]} may leave")
        else:
            require(
                self.evictable(victim.id) is victim,
                f"{name}: names node {victim.id}, which is gone, is locked or has children",
            )
        return victim

    def _asked(self) -> Evictable:
        """Return :meth:`evictable` with a bound on the number of calls."""
        left = _ASKED + _ASKED_A_NODE * len(self.nodes)

        def ask(node_id: int) -> Node | None:
            nonlocal left
            left -= 1
            require(left > 0, f"{self.policy.name}: victim() comes to no end in a pool of {len(self.nodes)} nodes")
            return self.evictable(node_id)

        return ask

    def drop(self, node: Node) -> None:
        """Remove a node from the pool, and offer its parent."""
        del self.nodes[node.id], self._digests[node.digest], self._children[node.parent][node.id]
        self.locks.pop(node.id, None)
        self.tell("remove", node, self.moment())
        if node.parent:
            self.offer(self.nodes[node.parent])


def _shown(node: Node | None) -> str:
    return "none" if node is None else f"node {node.id}"
