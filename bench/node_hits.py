"""How much of what one node would find do two and four nodes find that read one another's host memory?

Simulated (``thermocline simulate``): the scheduler's own core under virtual time, so the load of the machine changes
nothing. There are always as many workers and as much memory in all: on one node with one host pool, on two, and on
four. Nodes read one another's host memory at ``--network-gb-s``, or do not share. All memory together holds
``--memory`` of what the workload has to compute where nothing is ever evicted: a sixth on devices, but on each
at least what the longest prompts take.

Workloads are a recorded trace, at each of ``--time-scales`` times its speed, and generators, each of these with several
seeds; the target is for the worst of a workload's runs: nodes that share find at least 0.95 of what one node finds. At
twice its speed the conversation trace of Mooncake is more than the workers can answer.

``python -m bench.node_hits --trace FILE [--requests 1000] [--seeds 1,2,3] [--out FILE]``
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from bench import results_file
from thermocline.simulate.__main__ import GC_THRESHOLDS, parser, prepare

NODES = (1, 2, 4)
WORKERS = max(NODES)
GENERATORS = "documents,retrieval,tenants,agents"
TRACE, TIMES = "trace", ", speed ×"
TARGET = 0.95
ENDLESS = 2**33
"""Tokens of host memory from which nothing is evicted."""

DEVICE_SHARE = 1 / 6
LEAST_OF_TRACE = 200_000
LEAST_OF_GENERATED = 60_000


def scale_of(workload: str) -> float | None:
    """By what the trace's times are divided; None for a generator."""
    name, _, scale = workload.partition(TIMES)
    return float(scale or 1) if name == TRACE else None


def simulate(
    options: argparse.Namespace, workload: str, seed: int, nodes: int, memory: tuple[int, int], gb_s: float
) -> dict[str, Any]:
    """Figures of one simulation; ``memory`` is tokens of each device, and of host memory in all."""
    device, host = memory
    scale = scale_of(workload)
    asked = ["--workload", workload] if scale is None else ["--trace", str(options.trace), "--time-scale", str(scale)]
    line = [
        *(*asked, "--requests", str(options.requests), "--seed", str(seed)),
        *("--hardware", options.hardware, "--model", options.model, "--page-size", "16"),
        *("--workers", str(WORKERS), "--workers-per-node", str(WORKERS // nodes)),
        *("--device-tokens", str(device), "--host-tokens", str(host // nodes)),
        *("--network-gb-s", str(gb_s), "--set", "host_writes=through"),
    ]
    simulation = prepare(parser().parse_args(line))
    simulation.run()
    return simulation.figures()


def compare(options: argparse.Namespace, workload: str, seed: int) -> dict[str, Any]:
    """One workload with one seed, on each number of nodes."""
    least = LEAST_OF_GENERATED if scale_of(workload) is None else LEAST_OF_TRACE
    endless = simulate(options, workload, seed, 1, (least, ENDLESS), 0.0)
    tokens = options.memory * endless["input_tokens"] * (1 - endless["hit_ratio"])
    memory = max(least, int(DEVICE_SHARE * tokens / WORKERS)), int((1 - DEVICE_SHARE) * tokens)
    one = simulate(options, workload, seed, 1, memory, 0.0)
    rows = []
    for nodes in NODES[1:]:
        for gb_s in (options.network_gb_s, 0.0):
            found = simulate(options, workload, seed, nodes, memory, gb_s)
            rows.append(
                {
                    "nodes": nodes,
                    "shares": gb_s > 0,
                    "hit_ratio": found["hit_ratio"],
                    "of_one_node": found["hit_ratio"] / one["hit_ratio"],
                    "borrowed_tokens": found["borrowed_tokens"],
                    "ttft_p50_ms": found["ttft_ms"]["p50"],
                }
            )
    return {
        "seed": seed,
        "requests": one["requests"],
        "input_tokens": one["input_tokens"],
        "device_tokens": memory[0],
        "host_tokens": memory[1],
        "never_evicted": endless["hit_ratio"],
        "one_node": one["hit_ratio"],
        "one_node_ttft_p50_ms": one["ttft_ms"]["p50"],
        "rows": rows,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All workloads; those of generators with each seed."""
    workloads = {
        name: [int(seed) for seed in options.seeds.split(",")] for name in options.workloads.split(",") if name
    }
    if options.trace:
        scales = [float(scale) for scale in options.time_scales.split(",")]
        names = [TRACE if scale == 1 else f"{TRACE}{TIMES}{scale:g}" for scale in scales]
        workloads = {name: [1] for name in names} | workloads  # A trace has nothing that a seed would draw.
    found = []
    for workload, seeds in workloads.items():
        runs = []
        for seed in seeds:
            runs.append(compare(options, workload, seed))
            shares = {(row["nodes"], row["shares"]): f"{row['of_one_node']:.3f}" for row in runs[-1]["rows"]}
            print(f"{workload:<16} {seed} one {runs[-1]['one_node']:.3f} {shares}", flush=True)
        least = min(row["of_one_node"] for run in runs for row in run["rows"] if row["shares"])
        found.append({"of": workload, "of_one_node": least, "target_of_one_node": TARGET, "runs": runs})
    return found


def main() -> None:
    known = results_file.arguments(__doc__, "--out")
    known.add_argument("--trace", type=Path, help="trace in the Mooncake format; none leaves it out")
    known.add_argument("--time-scales", default="1,2,0.5", help="divide the trace's times by these, with commas")
    known.add_argument("--workloads", default=GENERATORS, help="generators, with commas")
    known.add_argument("--seeds", default="1,2,3", help="with commas")
    known.add_argument("--requests", type=int, default=1000)
    known.add_argument("--memory", type=float, default=0.4, help="share of what is computed")
    known.add_argument("--network-gb-s", type=float, default=12.5)
    known.add_argument("--hardware", default="h800")
    known.add_argument("--model", default="llama-3.1-8b")
    options = known.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    about = {name: getattr(options, name) for name in ("memory", "network_gb_s", "hardware", "model")}
    results = about | {"workers": WORKERS, "workloads": measure(options)}
    print(results_file.write("node_hits", results, seed=1, out=options.out))


if __name__ == "__main__":
    main()
