"""Hit ratio of every eviction policy on a trace of blocks, beside the offline optimum.

Leaves only, room before insertion, nobody's own path evicted: see ``bench/blocks.py``. Nothing is
tuned here; the last fifth of the requests is counted apart as well. All policies together write the committed
results; a choice of them is printed, and written only where ``--out`` says. With ``--renew`` a choice
takes its place among the committed results, whose other rows stay as they are.

``python -m bench.policy_hit_ratio --trace FILE [--policies a,b] [--blocks 600,2000] [--generators] [--renew]
[--out FILE]``
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import services.scheduler.policies  # noqa: F401  To be compared.
from bench import results_file
from bench.block_workloads import WORKLOADS
from bench.blocks import BlockCache, BlockRequest, read_blocks, run_blocks
from bench.blocks_hotness import BlockHotness, FilterHotness
from bench.blocks_optimum import furthest_use
from services.scheduler.core.cache.eviction import POLICIES, Policy, make_policy
from shared.errors import InvalidRequest
from shared.messages.cell_events import CellConfig
from thermocline.testing.exact_hotness import ExactHotness
from thermocline.trace.format import BLOCK_TOKENS

OPTIMUM = "optimum"
EXACT = "hotprefix, exact"
OURS = "thermocline"
LOOK_NOTHING_UP = (
    "fifo",
    "lru",
    "lfu",
    "2q",
    "slru",
    "s3-fifo",
    "sieve",
    "arc",
    "gdsf",
    "w-tinylfu",
    "thermocline",
    OPTIMUM,
)

Row = dict[str, Any]
Table = dict[str, dict[str, Row]]
"""Rows by capacity in blocks, as text, and by policy."""


def measure(requests: Sequence[BlockRequest], name: str, capacity: int, block_tokens: int = BLOCK_TOKENS) -> Row:
    """One pass of the requests under one policy."""
    policy: Policy
    if name == OPTIMUM:
        policy = furthest_use(requests)
    else:
        policy = make_policy("hotprefix" if name == EXACT else name, capacity * block_tokens, CellConfig())
    hotness: BlockHotness = ExactHotness()
    if name not in (*LOOK_NOTHING_UP, EXACT):
        hotness = FilterHotness(capacity * block_tokens)
    cache = BlockCache(policy, capacity, hotness, block_tokens=block_tokens)
    if isinstance(hotness, FilterHotness):
        hotness.resident = cache.digests
    started = time.perf_counter()
    found = run_blocks(cache, requests)
    seconds = time.perf_counter() - started
    ratios = {"ratio": found.ratio, "late_ratio": found.late_ratio}
    return asdict(found) | ratios | {"seconds": round(seconds, 2)}


def table_of(
    requests: Sequence[BlockRequest], names: Sequence[str], capacities: Sequence[int], block_tokens: int = BLOCK_TOKENS
) -> Table:
    """Every policy at every capacity, with how much of the gap each one closes."""
    table: Table = {}
    for capacity in capacities:
        rows = {}
        for name in (*names, OPTIMUM):
            rows[name] = measure(requests, name, capacity, block_tokens)
            print(f"  {capacity:>7} {name:<18} {rows[name]['ratio']:.4f}  {rows[name]['seconds']:.1f} s", flush=True)
        table[str(capacity)] = with_gaps(rows)
    return table


def with_gaps(rows: dict[str, Row]) -> dict[str, Row]:
    """Add to each policy the part of the way from the best of the others to the optimum that it goes.

    It is 0 for a policy that equals the best of the others, negative for one that is worse, and None where the
    best of the others is the optimum.
    """
    online = [name for name in rows if name not in (OPTIMUM, EXACT)]
    for name in online:
        for kind in ("", "late_"):
            best = max((rows[other][f"{kind}ratio"] for other in online if other != name), default=0.0)
            gap = rows[OPTIMUM][f"{kind}ratio"] - best
            rows[name][f"{kind}gap_closed"] = (rows[name][f"{kind}ratio"] - best) / gap if gap > 0 else None
    return rows


def print_table(title: str, table: Table) -> None:
    """Ratios of the whole and, behind a stroke, of the last fifth; then gaps closed and seconds."""
    names = list(next(iter(table.values())))
    print(f"\n{title}\n{'blocks':<18}" + "".join(f"{capacity:>16}" for capacity in table))
    for name in names:
        cells = (f"{rows[name]['ratio']:.4f} / {rows[name]['late_ratio']:.4f}" for rows in table.values())
        print(f"{name:<18}" + "".join(f"{cell:>16}" for cell in cells))
    print("\ngap closed, from the best of the others to the optimum")
    for name in names:
        if all("gap_closed" in rows[name] for rows in table.values()):
            gaps = (rows[name]["gap_closed"] for rows in table.values())
            print(f"{name:<18}" + "".join(f"{'-' if gap is None else f'{gap:+.3f}':>16}" for gap in gaps))
    print("\nseconds of a pass")
    for name in names:
        print(f"{name:<18}" + "".join(f"{rows[name]['seconds']:>16.1f}" for rows in table.values()))


def reused_blocks(requests: Sequence[BlockRequest]) -> int:
    """Blocks that are asked for more than once: what an unbounded pool could make use of."""
    seen: dict[int, bool] = {}
    for request in requests:
        for block in request.blocks:
            seen[block] = block in seen
    return sum(seen.values())


def measure_generators(names: Sequence[str], seed: int) -> dict[str, Any]:
    """The seeded workloads, at a quarter, half and all of the blocks that are asked for again."""
    results = {}
    for workload, (block_tokens, make) in WORKLOADS.items():
        requests = make(seed)
        reused = reused_blocks(requests)
        print(f"\n{workload}: {len(requests)} requests, {reused} blocks are asked for again", flush=True)
        capacities = sorted({max(1, reused // part) for part in (4, 2, 1)})
        table = table_of(requests, names, capacities, block_tokens)
        print_table(workload, table)
        results[workload] = {
            "requests": len(requests),
            "block_tokens": block_tokens,
            "reused_blocks": reused,
            "by_blocks": table,
        }
    return results


def renewed(results: dict[str, Any]) -> dict[str, Any]:
    """The committed results with these rows in place of their own. Refuses results of other requests or capacities."""
    path = results_file.RESULTS / "policy_hit_ratio.json"
    committed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    parts = [(committed, results)]
    parts += [(committed["generators"][name], part) for name, part in results.get("generators", {}).items()]
    for old, new in parts:
        if old["requests"] != new["requests"] or not new["by_blocks"].keys() <= old["by_blocks"].keys():
            _refuse("--renew: the committed results are of other requests or capacities")
        for capacity, rows in new["by_blocks"].items():
            old["by_blocks"][capacity] = with_gaps(old["by_blocks"][capacity] | rows)
    return committed


def chosen(text: str) -> list[str]:
    """The policies that were named, or all. Ends the process with exit code 2 for one that does not exist."""
    names = text.split(",") if text else [*POLICIES, EXACT]
    unknown = [name for name in names if name not in (*POLICIES, EXACT)]
    if unknown:
        _refuse(f"there is no policy {unknown[0]!r}; known are {', '.join(POLICIES)}")
    return names


def _capacities(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        _refuse(f"--blocks {text!r}: wanted positive numbers with commas between them")
    return sorted({int(part) for part in parts})


def _refuse(fault: str) -> NoReturn:
    print(f"policy_hit_ratio: {fault}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--policies", default="")
    parser.add_argument("--blocks", default="600,2000,6000,20000,60000")
    parser.add_argument("--generators", action="store_true")
    parser.add_argument("--renew", action="store_true")
    options = parser.parse_args()
    names, capacities = chosen(options.policies), _capacities(options.blocks)
    try:
        requests = read_blocks(options.trace)
    except InvalidRequest as fault:
        _refuse(str(fault))
    table = table_of(requests, names, capacities)
    print_table(options.trace.name, table)
    results: dict[str, Any] = {
        "trace": options.trace.name,
        "requests": len(requests),
        "blocks": sum(len(request.blocks) for request in requests),
        "by_blocks": table,
    }
    if options.generators:
        results["generators"] = measure_generators(names, options.seed)
    is_whole = not options.policies and options.generators
    if options.renew:
        results, is_whole = renewed(results), True
        table = results["by_blocks"]
    if options.out or is_whole:
        print(results_file.write("policy_hit_ratio", results, seed=options.seed, out=options.out))


if __name__ == "__main__":
    main()
