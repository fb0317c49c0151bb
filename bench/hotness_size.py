"""What a hotness filter of which size is worth: hit ratio of ``hotprefix``, memory and wrong hits, by tokens an entry.

The filter of the scheduler has an entry for every 16 tokens of its pools (``hotness/tracking.py``), within bounds. Here
it has one for every 256 to 8, and for comparison counts are exact.

``python -m bench.hotness_size --trace FILE [--blocks 600,2000,6000,20000] [--queries 1000000] [--seed 1]``
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import services.scheduler.policies  # noqa: F401  To be made by name.
from bench import results_file
from bench.blocks import BlockCache, BlockRequest, read_blocks, run_blocks
from bench.blocks_hotness import FilterHotness
from services.scheduler.core.cache.eviction import make_policy
from services.scheduler.core.cache.hotness.filter import SLOTS, HotnessFilter
from shared.messages.cell_events import CellConfig
from thermocline.testing.exact_hotness import ExactHotness
from thermocline.trace.format import BLOCK_TOKENS

TOKENS_AN_ENTRY = (256, 128, 64, 32, 16, 8)


def measure(requests: Sequence[BlockRequest], blocks: int, tokens_an_entry: int, unknown: int, seed: int) -> Any:
    """One pass. ``tokens_an_entry`` of 0 is exact counts; wrong hits are of so many random digests, at the end."""
    policy = make_policy("hotprefix", blocks * BLOCK_TOKENS, CellConfig())
    if not tokens_an_entry:
        exact = run_blocks(BlockCache(policy, blocks, ExactHotness()), requests)
        return {"ratio": exact.ratio, "late_ratio": exact.late_ratio}
    hotness = FilterHotness(0)
    entries = blocks * BLOCK_TOKENS // tokens_an_entry
    hotness.filter = HotnessFilter(base_bits=(-(-entries // SLOTS) - 1).bit_length())
    cache = BlockCache(policy, blocks, hotness)
    hotness.resident = cache.digests
    found = run_blocks(cache, requests)
    digests = np.random.default_rng(seed).integers(0, 2**64, size=unknown, dtype=np.uint64)
    return {
        "ratio": found.ratio,
        "late_ratio": found.late_ratio,
        "entries": hotness.filter.capacity,
        "load_factor": hotness.filter.load_factor,
        "mib": hotness.filter.nbytes / 2**20,
        "wrong_hits": float((hotness.filter.slots_of(digests) >= 0).mean()),
    }


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--blocks", default="600,2000,6000,20000")
    parser.add_argument("--queries", type=int, default=1_000_000, help="unknown digests that each filter is asked for")
    options = parser.parse_args()
    requests = read_blocks(options.trace)
    table: dict[str, dict[str, Any]] = {}
    for blocks in [int(text) for text in options.blocks.split(",")]:
        rows = table[str(blocks)] = {}
        for tokens in (*TOKENS_AN_ENTRY, 0):
            rows[str(tokens) if tokens else "exact"] = row = measure(
                requests, blocks, tokens, options.queries, options.seed
            )
            print(
                f"{blocks:>7} {tokens or 'exact':>6}  " + "  ".join(f"{key} {value:.6g}" for key, value in row.items())
            )
    results = {"trace": options.trace.name, "block_tokens": BLOCK_TOKENS, "by_blocks": table}
    print(results_file.write("hotness_size", results, seed=options.seed))


if __name__ == "__main__":
    main()
