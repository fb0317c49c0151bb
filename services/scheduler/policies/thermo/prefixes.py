"""The prefixes that end where a node ends, or ended: a row each, resident or not.

A row stays where it is when its node is evicted, and is a ghost from then on, so that reuse after an eviction is
recognised. Ghosts are bounded in number; the one that was evicted longest ago is forgotten. A prefix costs about 90
bytes, in memory as in a snapshot.

Prefixes that one request used together share a row of :class:`Contexts`, so that a fact about the request (how much of
it was new, which turn of a conversation it was) is stored once.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.prefix_tree import HEAD_TOKENS, Node
from services.scheduler.policies.thermo.columns import ROWS, Reals, Wholes, grow, reals, wholes
from services.scheduler.policies.thermo.contexts import Contexts
from services.scheduler.policies.thermo.index import Index
from shared.ids import TOKEN_BYTES

_MASK = 2**64 - 1
NO_SAMPLE = -1


class Prefixes(msgspec.Struct):
    """Columns by row, from 1 on. At most ``limit`` ghosts. Row 0 is none, and both ends of the list of ghosts."""

    limit: int = 65536
    digest: Wholes = wholes("Q")
    head: Wholes = wholes("Q")  # Key of the span's beginning, see head_of.
    latest: Wholes = wholes("Q")  # Digest of the continuation that was used last; 0 is none.
    node: Wholes = wholes("Q")  # Id of its node; 0 for a ghost.
    sample: Wholes = wholes("q")  # Number of its sample in the law's window; NO_SAMPLE is none.
    end: Wholes = wholes("I")  # Depth of its end, in tokens.
    context: Wholes = wholes("I")  # Row of the request that used it last; 0 is none yet.
    pace: Reals = reals("f")  # Smoothed seconds between uses; -1 with fewer than two.
    count: Wholes = wholes("H")
    turn: Wholes = wholes("H")
    children: Wholes = wholes("H")  # Number of continuations seen so far.
    passed: Wholes = wholes(
        "B"
    )  # Whether a request took another branch since its last use: 0 no, else a class of their number.
    is_headed: Wholes = wholes("B")  # 1 for a ghost that ``by_head`` finds.
    older: Wholes = wholes("I")  # For a ghost: the one that was evicted before it.
    newer: Wholes = wholes("I")  # For a ghost: the one that was evicted after it.
    ghosts: int = 0
    contexts: Contexts = msgspec.field(default_factory=Contexts)
    by_digest: Index = msgspec.field(default_factory=Index)
    by_node: Index = msgspec.field(default_factory=Index)
    by_head: Index = msgspec.field(default_factory=Index)  # The latest ghost under each key.
    hopes: dict[int, int] = {}  # By row of a resident prefix: digest of a longer ghost that begins with it.
    free: Wholes = wholes("I")

    def find(self, digest: int) -> int:
        """Return the row of this prefix, resident or not, or 0."""
        return self.by_digest.find(self.digest, digest)

    def of_node(self, node_id: int) -> int:
        """Return the row of a resident node, or 0."""
        return self.by_node.find(self.node, node_id)

    def of_nodes(self, node_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each of these nodes, or 0 (int64)."""
        return self.by_node.find_all(self.node, node_ids)

    def resident(self) -> int:
        """Return the number of resident prefixes."""
        return self.by_node.count

    def open(self, digest: int, head: int, node_id: int, end: int) -> int:
        """Return a row for a prefix that has none, of a node that became resident."""
        if len(self.free) == 1:
            first = len(self.digest)
            columns = (self.digest, self.head, self.latest, self.node, self.sample, self.end, self.context, self.pace)
            counts = (self.count, self.turn, self.children, self.passed, self.is_headed, self.older, self.newer)
            grow((*columns, *counts), ROWS)
            self.free.extend(range(first + ROWS - 1, first - 1, -1))
        row = self.free.pop()
        self.digest[row], self.head[row], self.node[row], self.end[row] = digest, head, node_id, end
        self.latest[row], self.sample[row], self.context[row], self.pace[row] = 0, NO_SAMPLE, 0, -1.0
        self.count[row], self.turn[row], self.children[row], self.passed[row] = 1, 0, 0, 0
        self.by_digest.add(self.digest, row)
        self.by_node.add(self.node, row)
        return row

    def bind(self, row: int, context: int) -> None:
        """Make the prefix refer to this request, and no longer to an older one."""
        before = self.context[row]
        if before != context:
            self.contexts.users[context] += 1
            self.contexts.release(before)
            self.context[row] = context

    def make_ghost(self, row: int) -> None:
        """Make the prefix a ghost, the newest one: its node is gone."""
        self.by_node.remove(self.node, row)
        self.node[row] = 0
        if self.hopes:
            self.hopes.pop(row, None)
        last = self.older[0]
        self.older[row], self.newer[row], self.newer[last], self.older[0] = last, 0, row, row
        self.ghosts += 1
        earlier = self.by_head.find(self.head, self.head[row])
        if earlier:
            self.by_head.remove(self.head, earlier)  # One row a key, so that chains stay short.
            self.is_headed[earlier] = 0
        self.by_head.add(self.head, row)
        self.is_headed[row] = 1

    def revive(self, row: int, node_id: int) -> None:
        """Make a ghost resident: it has a node again."""
        self._leave_ghosts(row)
        self.node[row] = node_id
        self.by_node.add(self.node, row)

    def forget(self, row: int) -> None:
        """Remove a ghost permanently, and free its row."""
        self._leave_ghosts(row)
        self.by_digest.remove(self.digest, row)
        self.contexts.release(self.context[row])
        self.context[row] = 0
        self.free.append(row)

    def oldest(self) -> int:
        """Return the row of the ghost evicted first, once there are more than the limit; else 0."""
        return self.newer[0] if self.ghosts > self.limit else 0

    def users(self) -> Counter[int]:
        """Return how many prefixes refer to each request's row, counted afresh. Does not change the state."""
        found = Counter(np.frombuffer(self.context, np.uint32).tolist())
        del found[0]
        return found

    def absorbed(self, node: Node, parent: int, head: int) -> tuple[list[int], int]:
        """Return ghosts whose prefixes end within the node's span, top first, and one that goes on beyond it, or 0.

        A history that was cached turn by turn comes back as one span when it was evicted, or cut by chunks.
        """
        found: list[int] = []
        digest, is_exact = self.digest[parent], parent > 0
        offset, end = node.depth, node.end
        hoped = self.hopes.get(parent) if self.hopes else None
        ghost = self._ghost_under(head) if hoped is None else self._ghost(hoped)
        while ghost and self.end[ghost] > offset:
            if self.end[ghost] > end:
                return found, ghost
            if not is_exact:
                digest, is_exact = start_digest(node), True
            span = node.tokens_between(offset - node.depth, self.end[ghost] - node.depth)
            if extend(digest, span) != self.digest[ghost]:
                break
            found.append(ghost)
            digest, offset = self.digest[ghost], self.end[ghost]
            if offset == end:
                break
            following = node.tokens_between(offset - node.depth, offset - node.depth + HEAD_TOKENS)
            # The rest of the span may be too short for a key; then the continuation used last is a guess.
            ghost = self._ghost_under(head_of(digest, following)) or self._ghost(self.latest[ghost])
        return found, 0

    def _ghost_under(self, head: int) -> int:
        return self.by_head.find(self.head, head)

    def _ghost(self, digest: int) -> int:
        row = self.find(digest)
        return 0 if self.node[row] else row

    def _leave_ghosts(self, row: int) -> None:
        older, newer = self.older[row], self.newer[row]
        self.newer[older], self.older[newer] = newer, older
        self.ghosts -= 1
        if self.is_headed[row]:
            self.by_head.remove(self.head, row)
            self.is_headed[row] = 0


def head_of(above: int, tokens: bytes) -> int:
    """Return the key of a span by the prefix above it and its first tokens; the same however long the span is."""
    return extend(above, tokens[: HEAD_TOKENS * TOKEN_BYTES])


def start_digest(node: Node) -> int:
    """Return the digest of the prefix above a node, from its own: a polynomial with an odd, invertible base."""
    tokens = node.tokens
    tail = extend(0, tokens)
    power = (extend(1, tokens) - tail) & _MASK
    return ((node.end_digest - tail) * pow(power, -1, 1 << 64)) & _MASK
