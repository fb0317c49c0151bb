"""Hit ratio of every policy on families of seeded workloads, beside the offline optimum.

By default on the workloads that policies are developed with (``bench/held_out.py``) and, with ``--trace``, on that
trace; with ``--held-out`` on those that are held out instead, which is for the report alone, and with its seeds unless
others are named. Each in pools of an eighth, a quarter and half of the blocks that are asked for more than once.

``python -m bench.policy_families [--seeds 1,2] [--families a,b] [--policies a,b] [--held-out] [--trace FILE]
[--out FILE]``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import results_file
from bench.blocks import BlockRequest, read_blocks
from bench.held_out import BLOCK_TOKENS, REPORT_SEEDS, is_held_out, requests_of
from bench.policy_hit_ratio import EXACT, OPTIMUM, OURS, chosen, measure, reused_blocks
from thermocline.simulate.workloads import WORKLOADS
from thermocline.trace.format import BLOCK_TOKENS as TRACE_BLOCK_TOKENS

PARTS = (8, 4, 2)
TRACE_BLOCKS = (600, 2000, 6000)

Cell = dict[str, Any]


def cells_of(
    label: str, requests: Sequence[BlockRequest], names: Sequence[str], capacities: Sequence[int], block_tokens: int
) -> Iterator[Cell]:
    """Each pool's hit ratios by policy, and ours over the best of the others."""
    for capacity in capacities:
        ratios = {name: measure(requests, name, capacity, block_tokens)["ratio"] for name in names}
        best = max((name for name in names if name not in (OURS, OPTIMUM)), key=ratios.__getitem__)
        over = ratios[OURS] / ratios[best] - 1 if OURS in ratios and ratios[best] else 0.0
        shown = "  ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
        print(f"{label:<16} {capacity:>6}  best {best:<10} {100 * over:+6.2f}%  {shown}", flush=True)
        yield {"blocks": capacity, "best_other": best, "ours_over_best": over, "ratios": ratios}


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """In how many pools ours wins or ties within one per cent, and how far it is behind and ahead."""
    over = sorted(cell["ours_over_best"] for cell in cells)
    return {
        "pools": len(over),
        "within_one_percent": sum(value >= -0.01 for value in over),
        "worst": over[0],
        "median": over[len(over) // 2],
        "mean": sum(over) / len(over),
        "best": over[-1],
    }


def main() -> None:
    parser = results_file.arguments(__doc__, "--out")
    parser.add_argument("--seeds", default="")
    parser.add_argument("--families", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default="")
    parser.add_argument("--held-out", action="store_true", help="the report: only what is held out")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    names = [*(name for name in chosen(options.policies) if name != EXACT), OPTIMUM]
    seeds = [int(text) for text in options.seeds.split(",") if text] or [
        *(REPORT_SEEDS if options.held_out else (1, 2))
    ]
    workloads: list[dict[str, Any]] = []
    for family in options.families.split(","):
        for seed in seeds:
            if is_held_out(family, seed) is not options.held_out:
                continue
            requests = requests_of(family, seed, is_report=options.held_out)
            reused = reused_blocks(requests)
            capacities = [max(1, reused // part) for part in PARTS]
            cells = list(cells_of(f"{family} {seed}", requests, names, capacities, BLOCK_TOKENS))
            workloads.append(
                {
                    "family": family,
                    "seed": seed,
                    "requests": len(requests),
                    "blocks": sum(len(request.blocks) for request in requests),
                    "reused_blocks": reused,
                    "pools": cells,
                }
            )
    found = summary([cell for workload in workloads for cell in workload["pools"]])
    print(" ".join(f"{key} {value:.4g}" for key, value in found.items()))
    results: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "summary": found, "workloads": workloads}
    if options.trace is not None:
        requests = read_blocks(options.trace)
        results["trace"] = list(cells_of("trace", requests, names, TRACE_BLOCKS, TRACE_BLOCK_TOKENS))
    kind = "held_out" if options.held_out else "development"
    if options.out or not options.policies:
        print(results_file.write(f"policy_families_{kind}", results, seed=seeds[0], out=options.out))


if __name__ == "__main__":
    main()
