"""A gateway's estimate of the prompt heads that its cell holds, from the prompts it sent and the hits they had.

A model of the cell's cache that costs its scheduler nothing. Heads are dropped in the order of their last use when
they stand for more tokens than the cell's pools and disks hold, or when an answer shows that the cell has evicted
them. Pure: time plays no part.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from services.gateway.prompt_heads import Head
from shared.messages.cells import HEAD_BYTES

MOST_HEADS = 65_536
"""Limit on the heads that one gateway reports: 512 KiB of digests."""

MOST_CUT = 8
"""For a single answer at most one in so many heads is dropped: a cell does not evict by last use alone."""


class HeldHeads:
    """Heads by digest, least recently used first, each with the number of tokens between it and the head above."""

    def __init__(self, most: int = MOST_HEADS) -> None:
        """Hold at most ``most`` heads; their tokens have no bound before :meth:`bound` sets one."""
        self._most = most
        self._tokens_most: int | None = None
        self._held: dict[int, int] = {}
        self._tokens = 0
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def __len__(self) -> int:
        """Return the number of heads."""
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Number of tokens that the heads stand for."""
        return self._tokens

    def bound(self, tokens: int) -> None:
        """Set the number of tokens that all tiers of the cell hold together."""
        self._tokens_most = tokens
        self._shrink()

    def note(self, head: Head, prompt_tokens: int, cached_tokens: int) -> None:
        """Note an answered prompt: ``cached_tokens`` of it were hits, and now the cell holds all of it."""
        if not head.nbytes:
            return
        found_bytes = head.nbytes * cached_tokens // max(1, prompt_tokens)
        self._learn(head, found_bytes)
        above = (0, *head.depths)
        # The deepest first, so that none is dropped before those below it.
        for place in range(len(head.digests) - 1, -1, -1):
            span = head.depths[place] - above[place]
            self._hold(head.digests[place], span * prompt_tokens // head.nbytes)
        self._shrink()

    def clear(self) -> None:
        """Forget everything: the cell is empty."""
        while self._held:
            self._give_up(next(iter(self._held)))

    def take_changes(self) -> tuple[bytes, bytes]:
        """Return packed digests (added, removed) since the last call."""
        added, removed = pack_heads(self._added), pack_heads(self._removed)
        self._added, self._removed = {}, {}
        return added, removed

    def take_whole(self) -> bytes:
        """Return packed digests of all heads, most recently used last, and forget the changes so far."""
        self._added, self._removed = {}, {}
        return pack_heads(self._held)

    def _learn(self, head: Head, found_bytes: int) -> None:
        """Drop heads used before a head that is held here but was not a hit.

        Only a head of twice the depth of the hit counts: lengths are estimates, and a part of a page is no hit.
        """
        missed = next(
            (
                digest
                for digest, depth in zip(head.digests, head.depths, strict=True)
                if depth > 2 * found_bytes and digest in self._held
            ),
            None,
        )
        if missed is None:
            return
        for _ in range(max(1, len(self._held) // MOST_CUT)):
            oldest = next(iter(self._held))
            self._give_up(oldest)
            if oldest == missed:
                return

    def _hold(self, digest: int, tokens: int) -> None:
        earlier = self._held.pop(digest, None)
        self._held[digest] = tokens
        self._tokens += tokens - (earlier or 0)
        if earlier is None:
            if digest in self._removed:
                del self._removed[digest]
            else:
                self._added[digest] = None

    def _give_up(self, digest: int) -> None:
        self._tokens -= self._held.pop(digest)
        if digest in self._added:
            del self._added[digest]
        else:
            self._removed[digest] = None

    def _shrink(self) -> None:
        while self._held and (
            len(self._held) > self._most or (self._tokens_most is not None and self._tokens > self._tokens_most)
        ):
            self._give_up(next(iter(self._held)))


def pack_heads(digests: Collection[int]) -> bytes:
    """Return the digests as 8 bytes each, little-endian."""
    return np.fromiter(digests, dtype="<u8", count=len(digests)).tobytes()


def unpack_heads(packed: bytes) -> list[int]:
    """Undo :func:`pack_heads`; an incomplete digest at the end is ignored."""
    digests: list[int] = np.frombuffer(packed, dtype="<u8", count=len(packed) // HEAD_BYTES).tolist()
    return digests
