"""The offline optimum: evict what is used again furthest in the future (Belady 1966), among leaves.

Whoever uses a block uses all blocks above it, so a block's next use is never later than that of a block below it.
Of all that is resident, something whose next use is furthest is therefore always a leaf, and the rule that only
leaves can go costs the optimum nothing. Blocks of the request at hand may not be evicted for it, and all that it
lacks must be inserted, for every policy alike; among what is left, evicting the furthest is optimal, by the usual
exchange. What is never used again goes before everything else.

It knows the future, so it is for simulation only and no cell can be told to use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.blocks import BlockRequest
from services.scheduler.core.cache.digests import mix
from services.scheduler.core.cache.eviction.policy import Moment
from services.scheduler.core.cache.eviction.ranked import Rank, RankedPolicy
from services.scheduler.core.cache.prefix_tree import Node

_NEVER = 2**62


class FurthestUsePolicy(RankedPolicy, tag="optimum"):
    """``coming`` holds the numbers of the requests that use a digest, last one first; requests count from 1."""

    coming: dict[int, list[int]] = {}
    next_use: dict[int, int] = {}  # By node id.

    def rank(self, node: Node) -> Rank:
        return (-self.next_use[node.id],)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        for node in path:
            # The rank falls, which is well: the cache offers the lowest of a path anew, and others cannot go.
            self._look_ahead(node, moment.seq)

    def add(self, node: Node, moment: Moment) -> None:
        self._look_ahead(node, moment.seq)

    def remove(self, node: Node, moment: Moment) -> None:
        super().remove(node, moment)
        self.next_use.pop(node.id, None)

    def _look_ahead(self, node: Node, now: int) -> None:
        coming = self.coming[node.digest]
        while coming and coming[-1] <= now:
            coming.pop()
        self.next_use[node.id] = coming[-1] if coming else _NEVER


def furthest_use(requests: Sequence[BlockRequest]) -> FurthestUsePolicy:
    """The policy for these requests, in this order."""
    coming: dict[int, list[int]] = {}
    for number in range(len(requests), 0, -1):
        for block in requests[number - 1].blocks:
            coming.setdefault(mix(block), []).append(number)
    return FurthestUsePolicy(coming=coming)
