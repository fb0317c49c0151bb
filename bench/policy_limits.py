"""How much of the gap to the offline optimum is knowledge that no online policy can have.

Policies that know a part of the future, over the same block cache as ``bench.policy_hit_ratio``:

* **whether**: knows of every block whether it is ever used again, and evicts by recency among those that are;
* **whether, 80%**: the same, but wrong for one request in five (all its blocks together, as a predictor would be);
* **when, roughly**: knows which blocks are never used again, and the time of the next use of others up to a factor
  of ``2**N(0, 1)``.

None can be built. What they reach bounds what better prediction could bring.

``python -m bench.policy_limits --trace FILE [--blocks 600,2000]``
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results_file
from bench.blocks import BlockCache, BlockRequest, read_blocks, run_blocks
from bench.blocks_optimum import FurthestUsePolicy, furthest_use
from services.scheduler.core.cache.eviction.policy import Moment, Policy
from services.scheduler.core.cache.eviction.ranked import Rank
from services.scheduler.core.cache.prefix_tree import Node
from thermocline.testing.exact_hotness import ExactHotness

NEVER = 2**62
SEED = 1


class _WhetherPolicy(FurthestUsePolicy, tag="whether"):
    """``lies`` says for which requests the knowledge is wrong."""

    lies: list[bool] = []

    def rank(self, node: Node) -> Rank:
        comes_back = self.next_use[node.id] < NEVER
        return (comes_back != self.lies[node.last_use], node.last_use, -node.depth)


class _RoughlyPolicy(FurthestUsePolicy, tag="roughly"):
    """``errors`` holds the factor by which a request's blocks misjudge the time of their next use."""

    errors: list[float] = []
    seen_at: dict[int, int] = {}

    def rank(self, node: Node) -> Rank:
        coming = self.next_use[node.id]
        if coming >= NEVER:
            return (-NEVER,)
        seen = self.seen_at[node.id]
        return (-(seen + (coming - seen) * self.errors[seen]),)

    def _look_ahead(self, node: Node, now: int) -> None:
        super()._look_ahead(node, now)
        self.seen_at[node.id] = now

    def remove(self, node: Node, moment: Moment) -> None:
        super().remove(node, moment)
        self.seen_at.pop(node.id, None)


def oracles(requests: Sequence[BlockRequest]) -> dict[str, Policy]:
    """A fresh policy of each kind, which know these requests."""
    rng = random.Random(SEED)
    count = len(requests) + 1
    return {
        "optimum": furthest_use(requests),
        "when, roughly": _RoughlyPolicy(
            coming=furthest_use(requests).coming, errors=[2 ** rng.gauss(0, 1) for _ in range(count)]
        ),
        "whether": _WhetherPolicy(coming=furthest_use(requests).coming, lies=[False] * count),
        "whether, 80%": _WhetherPolicy(
            coming=furthest_use(requests).coming, lies=[rng.random() >= 0.8 for _ in range(count)]
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_limits", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--blocks", default="600,2000,6000,20000,60000")
    options = parser.parse_args()
    requests = list(read_blocks(options.trace))
    capacities = [int(text) for text in options.blocks.split(",")]
    found: dict[str, dict[str, Any]] = {}
    print(f"{'blocks':>8} " + " ".join(f"{name:>16}" for name in oracles(requests[:1])))
    for capacity in capacities:
        row = {
            name: round(run_blocks(BlockCache(policy, capacity, ExactHotness()), requests).ratio, 4)
            for name, policy in oracles(requests).items()
        }
        found[str(capacity)] = row
        print(f"{capacity:>8} " + " ".join(f"{value:>16.4f}" for value in row.values()), flush=True)
    results_file.write("policy_limits", {"requests": len(requests), "by_blocks": found}, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
