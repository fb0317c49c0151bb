"""How often each token of a chunk is chosen, and what the order of its rows costs (IMPRESS 4.4.1). Pure.

IMPRESS averages the importance of tokens. Storage does not see it; what it sees is better for its purpose, namely which
tokens were read. A token's **share** is a moving average over the reads of its chunk, each of one layer, of whether it
was among them. Chunks without a chosen token cost nothing, and teach nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import ChunkKey

WINDOW_READS = 128
"""Of the moving average: a few prompts of a model of some dozen layers."""

MAX_CHUNKS = 4096
"""That are remembered, the last used; about 500 bytes each."""

Shares = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Uses:
    shares: Shares
    reads: int = 0  # At most the window.
    wasted_bytes: int = 0


def expected_blocks(shares: Shares, mapping: npt.NDArray[np.uint32], block_tokens: int) -> float:
    """Blocks that a read of the chunk touches on average with its rows in this order, were tokens chosen independently:
    the sum over blocks of 1 - prod(1 - share) over their tokens.
    """
    untouched = np.prod(1 - shares[mapping].reshape(-1, block_tokens), axis=1)
    return float(len(untouched) - untouched.sum())


def by_share(shares: Shares) -> npt.NDArray[np.uint32]:
    """Return the mapping with the most often chosen token first; of equals, the earlier."""
    return np.argsort(-shares, kind="stable").astype(np.uint32)


class TokenUses:
    """Of the last used chunks."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._uses: OrderedDict[ChunkKey, _Uses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, key: ChunkKey, chosen: Shares, wasted_bytes: int) -> int:
        """Record a read that chose ``chosen`` (float32 [tokens]: the share of its heads that chose a token), and read
        ``wasted_bytes`` more than as many rows of one order could have taken. Returns what was wasted so far.
        """
        uses = self._uses.get(key)
        if uses is None:
            uses = self._uses[key] = _Uses(np.zeros_like(chosen))
            if len(self._uses) > self._max_chunks:
                self._uses.popitem(last=False)
        self._uses.move_to_end(key)
        # The plain average of the first reads, so that what is not known yet does not count as not chosen.
        uses.reads = min(uses.reads + 1, WINDOW_READS)
        uses.shares += (chosen - uses.shares) / np.float32(uses.reads)
        uses.wasted_bytes += wasted_bytes
        return uses.wasted_bytes

    def shares(self, key: ChunkKey) -> Shares | None:
        """Return a copy of what is known of its tokens, float32 [tokens]."""
        uses = self._uses.get(key)
        return None if uses is None else uses.shares.copy()

    def most_wasteful(self, least_bytes: int) -> ChunkKey | None:
        """Return the chunk that wasted most, and at least ``least_bytes``. O(chunks)."""
        wasteful = [(uses.wasted_bytes, key) for key, uses in self._uses.items() if uses.wasted_bytes >= least_bytes]
        return max(wasteful)[1] if wasteful else None

    def settled(self, key: ChunkKey) -> None:
        """Its order is as good as it can be for now: count what it wastes anew."""
        uses = self._uses.get(key)
        if uses is not None:
            uses.wasted_bytes = 0

    def forget(self, key: ChunkKey) -> None:
        """Forget a chunk that is gone."""
        self._uses.pop(key, None)
