"""What is known of each prefix, resident or not: its use so far, and the request that used it last.

Prefixes that one request used together share a :class:`Context`, so that a fact about the request (how much of it
was new, which turn of a conversation it was) is stored once. A record outlives its node as a ghost, in bounded
number, so that reuse after an eviction is seen as what it is.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.prefix_tree import HEAD_TOKENS, Node
from services.scheduler.policies.thermo.ghosts import Ghosts
from services.scheduler.policies.thermo.record import Context, Record
from shared.ids import TOKEN_BYTES

_MASK = 2**64 - 1


class Records(msgspec.Struct):
    """Records of resident prefixes by digest, and those of evicted ones as ghosts."""

    by_digest: dict[int, Record] = {}
    ghosts: Ghosts = msgspec.field(default_factory=Ghosts)
    contexts: dict[int, Context] = {}
    hopes: dict[int, int] = {}  # Digest of a longer ghost, of which the resident prefix of this digest is a beginning.

    def find(self, digest: int) -> Record | None:
        """Of this prefix, resident or not. Changes to one that is not must be written back, see :meth:`changed`."""
        return self.by_digest.get(digest) or self.ghosts.get(digest)

    def changed(self, record: Record) -> None:
        """Keep what was changed of a record that :meth:`find` returned."""
        if record.digest not in self.by_digest:
            self.ghosts.update(record)

    def bind(self, record: Record, number: int) -> None:
        """Let the record refer to this request, and no longer to an older one."""
        self.contexts[number].users += 1
        self.release(record.context)
        record.context = number

    def release(self, number: int) -> None:
        """One record (or holder) less refers to the request."""
        context = self.contexts.get(number)
        if context is not None:
            context.users -= 1
            if not context.users:
                del self.contexts[number]

    def users(self) -> Counter[int]:
        """How many records refer to each request, counted afresh. Does not mutate."""
        return Counter(record.context for record in self.by_digest.values()) + Counter(self.ghosts.contexts())

    def make_ghost(self, digest: int, head: int) -> Record | None:
        """The prefix's node is gone. Returns a record that is forgotten for it."""
        record = self.by_digest.pop(digest)
        self.hopes.pop(digest, None)
        forgotten = self.ghosts.put(record, head)
        if forgotten is not None:
            self.release(forgotten.context)
        return forgotten

    def forget(self, digest: int) -> Record | None:
        """Remove a ghost for good."""
        record = self.ghosts.take(digest)
        if record is not None:
            self.release(record.context)
        return record

    def revive(self, digest: int) -> Record | None:
        """The ghost of exactly this prefix, which has a node again from now on."""
        record = self.ghosts.take(digest)
        if record is not None:
            self.by_digest[digest] = record
        return record

    def absorbed(self, node: Node, parent: Record | None, head: int) -> tuple[list[Record], Record | None]:
        """Ghosts whose prefixes end within the node's span, top first, and one that goes on beyond it.

        A history that was cached turn by turn comes back as one span when it was evicted, or cut by chunks.
        """
        found: list[Record] = []
        digest = parent.digest if parent is not None else 0
        is_exact = parent is not None
        offset, end = node.depth, node.depth + len(node.tokens) // TOKEN_BYTES
        hoped = self.hopes.get(parent.digest) if parent is not None else None
        ghost = self.ghosts.under(head) if hoped is None else self.ghosts.get(hoped)
        while ghost is not None and ghost.end > offset:
            if ghost.end > end:
                return found, ghost
            if not is_exact:
                digest, is_exact = start_digest(node), True
            span = node.tokens[(offset - node.depth) * TOKEN_BYTES : (ghost.end - node.depth) * TOKEN_BYTES]
            if extend(digest, span) != ghost.digest:
                break
            found.append(ghost)
            digest, offset = ghost.digest, ghost.end
            following = node.tokens[(offset - node.depth) * TOKEN_BYTES :]
            if not following:
                break
            # What is left of the span may be too short for a key; then the way that was last taken is a guess.
            ghost = self.ghosts.under(head_of(digest, following)) or self.ghosts.get(ghost.latest)
        return found, None


def head_of(above: int, tokens: bytes) -> int:
    """Key of a span by the prefix above it and its first tokens; the same however long the span is."""
    return extend(above, tokens[: HEAD_TOKENS * TOKEN_BYTES])


def start_digest(node: Node) -> int:
    """Digest of the prefix above a node, from its own: the digest is a polynomial with an odd, invertible base."""
    tail = extend(0, node.tokens)
    power = (extend(1, node.tokens) - tail) & _MASK
    return ((node.end_digest - tail) * pow(power, -1, 1 << 64)) & _MASK
