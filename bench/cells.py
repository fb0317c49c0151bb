"""Several cells against one ideal cell of all their memory and workers: hit ratio, imbalance, waiting.

The router's own code chooses; beside it round robin, random, the least loaded cell, and hashing of the first 1,024
tokens, each in the same run. A workload is many copies at once of a trace or of a family of generated workloads, each
copy with other text but for what more than one in a hundred of the trace's requests share. A copy of a family has a
seed of its own, and its time is scaled to ten minutes. Workers are as fast as makes the ideal cell 70% busy.

Floors say what imbalance so few requests of such different lengths have anyway: each request is the work that it is in
the ideal cell wherever it goes, so that a cell is chosen by chance, by the requests in progress, or by the work so far.

``python -m bench.cells --trace FILE [--copies N] [--cells 1,4,16,64] [--out FILE]``, or ``--family NAME [--held-out]
[--requests N]`` in the place of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import msgspec

from bench import results_file
from bench.blocks import BlockRequest, read_blocks
from bench.cells_model import Routers, Run, Simple, found_by_one, heads_of, simulate
from bench.held_out import BLOCK_TOKENS, SPENT_SEEDS, is_held_out, requests_of
from services.gateway.prompt_heads import Head
from services.gateway.router.choice import Rules
from shared.arguments import whole_number
from shared.errors import InvalidRequest
from thermocline.simulate.workloads import WORKLOADS
from thermocline.trace.format import BLOCK_TOKENS as TRACE_BLOCK_TOKENS

WORKERS = 10_000
BUSY = 0.7
SPAN_S = 600.0
SHIFT_S = 300.0
SHARED_BY = 0.01
MEMORY = 0.25
"""Blocks of all cells together, as a part of the different blocks that are asked for."""

WITHIN = 0.9
BASELINES = ("round robin", "random", "least loaded", "hashing")
FLOORS = ("random", "least loaded", "least work")
"""Ways of routers to which every cell finds what the ideal cell does, so that they need not care who holds what."""

OURS, IDEAL = "router", "ideal"


def copies_of_trace(requests: Sequence[BlockRequest], copies: int, seed: int) -> list[BlockRequest]:
    """So many copies at once, shifted by up to SHIFT_S, that share what many of the trace's requests share."""
    uses = Counter(block for request in requests for block in request.blocks)
    shared = {block for block, found in uses.items() if found > SHARED_BY * len(requests)}
    rng = Random(seed)
    found: list[BlockRequest] = []
    most = max(uses) + 1
    for copy in range(copies):
        shift_ns = int(rng.uniform(0, SHIFT_S) * 1e9)
        for request in requests:
            blocks = [block if block in shared else block + (copy + 1) * most for block in request.blocks]
            found.append(request._replace(blocks=blocks, time_ns=request.time_ns + shift_ns))
    found.sort(key=lambda request: request.time_ns)
    return found


def copies_of_family(family: str, wanted: int, *, held_out: bool) -> list[BlockRequest]:
    """So many requests at least: one copy a seed, all of them held out or none."""
    found: list[BlockRequest] = []
    seed = first = 0
    while len(found) < wanted:
        seed += 1
        if is_held_out(family, seed) is not held_out or (held_out and seed in SPENT_SEEDS):
            continue
        requests = requests_of(family, seed, is_report=held_out)
        start_ns = min(request.time_ns for request in requests)
        span_ns = max(1, max(request.time_ns for request in requests) - start_ns)
        most = max(block for request in requests for block in request.blocks) + 1
        for request in requests:
            time_ns = int((request.time_ns - start_ns) / span_ns * SPAN_S * 1e9) + 1
            found.append(request._replace(blocks=[block + first for block in request.blocks], time_ns=time_ns))
        first += most
    found.sort(key=lambda request: request.time_ns)
    return found


def measure(requests: Sequence[BlockRequest], block_tokens: int, counts: Sequence[int], seed: int) -> dict[str, Any]:
    """Every way with every number of cells, beside the ideal cell."""
    heads: list[Head] = list(heads_of(requests, block_tokens))
    blocks = int(MEMORY * len({block for request in requests for block in request.blocks}))
    duration_s = (requests[-1].time_ns - requests[0].time_ns) / 1e9
    same: dict[str, Any] = {"blocks": blocks, "block_tokens": block_tokens, "workers": WORKERS}
    # Work is counted in tokens first: how fast workers are follows from it.
    tokens = simulate(requests, heads, Simple("random", 1, seed=seed), cells=1, token_s=1.0, **same).work_s
    token_s = BUSY * WORKERS * duration_s / tokens
    ideal = simulate(requests, heads, Simple("random", 1, seed=seed), cells=1, token_s=token_s, **same)
    rows = [_row(IDEAL, 1, ideal, ideal)]
    cached = found_by_one(requests, blocks, block_tokens)
    costs = [request.prompt_tokens - found for request, found in zip(requests, cached, strict=True)]
    for cells in counts:
        rows.append(
            _row(
                OURS,
                cells,
                simulate(requests, heads, Routers(cells, Rules()), cells=cells, token_s=token_s, **same),
                ideal,
            )
        )
        if cells > 1:
            for kind in BASELINES:
                run = simulate(requests, heads, Simple(kind, cells, seed=seed), cells=cells, token_s=token_s, **same)
                rows.append(_row(kind, cells, run, ideal))
            for kind in FLOORS:
                chooser = Simple(kind, cells, seed=seed).costs(costs)
                run = simulate(requests, heads, chooser, cells=cells, token_s=token_s, cached=cached, **same)
                rows.append(_row(f"floor: {kind}", cells, run, ideal))
    return {
        "requests": len(requests),
        "blocks": blocks,
        "block_tokens": block_tokens,
        "duration_s": round(duration_s, 1),
        "tokens_per_s_of_a_worker": 1 / token_s,
        "rows": rows,
    }


def _row(way: str, cells: int, run: Run, ideal: Run) -> dict[str, Any]:
    hits_of_ideal = run.hit_ratio / ideal.hit_ratio if ideal.hit_ratio else 1.0  # Where no cell finds anything.
    row = {"way": way, "cells": cells, **msgspec.to_builtins(run), "hits_of_ideal": hits_of_ideal}
    del row["work_s"]
    print(
        f"  {way:<19} {cells:>3} cells  hits {run.hit_ratio:.4f} ({row['hits_of_ideal']:.3f} of ideal)  imbalance "
        f"{run.imbalance:.3f}, now {run.imbalance_now:.3f}  wait {run.wait_mean_s:.2f} s, p99 {run.wait_p99_s:.1f} s  "
        f"told {run.told_bytes_per_s / 1e3:.0f} kB/s",
        flush=True,
    )
    return row


def counts_of(text: str) -> list[int]:
    """The numbers of cells that a command line names. Ends the process with exit code 2 for others."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        _refuse(f"--cells {text!r}: wanted positive numbers with commas between them")
    return [int(part) for part in parts]


def _requests(options: argparse.Namespace) -> list[BlockRequest]:
    """The requests of the copies. Ends the process with exit code 2 where there are none, or they give no rate."""
    if options.trace is None:
        return copies_of_family(options.family, options.requests, held_out=options.held_out)
    try:
        requests = read_blocks(options.trace)
    except InvalidRequest as fault:
        _refuse(str(fault))
    found = copies_of_trace(requests, options.copies, options.seed)
    if found[-1].time_ns == found[0].time_ns:
        _refuse(f"the requests of {options.trace} all come at once, so no rate follows from them")
    return found


def _refuse(fault: str) -> NoReturn:
    print(f"cells: {fault}", file=sys.stderr)
    raise SystemExit(2)


def aims(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all numbers of cells beside what is aimed at: within a tenth of the ideal cell.

    Empty where there was only one cell.
    """
    ours = [row for row in rows if row["way"] == OURS and row["cells"] > 1]
    if not ours:
        return {}
    return {
        "hits of the router over one ideal cell": _aim(min(row["hits_of_ideal"] for row in ours)),
        "mean work of a cell over the busiest's": _aim(min(1 / (1 + row["imbalance"]) for row in ours)),
        "mean requests in progress over the busiest cell's": _aim(min(1 / (1 + row["imbalance_now"]) for row in ours)),
    }


def _aim(ratio: float) -> dict[str, float]:
    return {"ratio": ratio, "target": WITHIN}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--out")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path)
    what.add_argument("--family", choices=tuple(WORKLOADS))
    parser.add_argument("--held-out", action="store_true", help="the report: only seeds that are held out")
    parser.add_argument("--cells", default="1,4,16,64")
    parser.add_argument("--copies", type=whole_number(10_000), default=4, help="of the trace")
    parser.add_argument("--requests", type=whole_number(10**9), default=40_000, help="of a family")
    options = parser.parse_args()
    counts, requests = counts_of(options.cells), _requests(options)
    name, block_tokens = ("trace", TRACE_BLOCK_TOKENS) if options.trace is not None else (options.family, BLOCK_TOKENS)
    found = measure(requests, block_tokens, counts, options.seed)
    results = {
        "workload": name,
        "held_out": options.held_out,
        "memory": MEMORY,
        "busy": BUSY,
        "workers": WORKERS,
        "rules": msgspec.to_builtins(Rules()),
        "aims": aims(found["rows"]),
        **found,
    }
    file = f"cells_of_{name.replace('-', '_')}{'_held_out' if options.held_out else ''}"
    print(results_file.write(file, results, seed=options.seed, out=options.out), flush=True)


if __name__ == "__main__":
    main()
