"""How long the simulator takes for many requests on many workers, what memory it needs, and where a cell stops.

Conversations arrive at a rate that grows with the workers (``--rate-per-worker``), on simulated A100s that serve
Llama-3.1-8B. Every ``--chunk`` requests a line says how far it is. Several numbers of workers show how load on the
scheduler grows with the cell: it handles one input at a time, so a cell stops growing where it is always busy.

``python -m bench.simulate_scale [--requests 1000000] [--workers 64] [--chunk 50000]``
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from typing import Any

from bench import results_file
from thermocline.simulate.__main__ import GC_THRESHOLDS, parser, prepare

SETTINGS = ("think_s=20", "lease_tokens=256", "max_queued=65536")


def run(options: argparse.Namespace, workers: int) -> dict[str, Any]:
    """One simulation, with a line for each chunk."""
    line = [
        *("--workload", "chat", "--hardware", options.hardware, "--model", options.model),
        *("--requests", str(options.requests), "--workers", str(workers), "--page-size", "16"),
        *("--rate", str(workers * options.rate_per_worker), "--seed", str(options.seed)),
        *("--device-tokens", str(options.device_tokens), "--host-tokens", str(8 * options.device_tokens)),
        *(part for setting in (*SETTINGS, *options.settings) for part in ("--set", setting)),
    ]
    simulation = prepare(parser().parse_args(line))
    started, started_cpu = time.perf_counter(), time.process_time()
    chunks: list[dict[str, Any]] = []

    def progress(over: int, simulated_s: float) -> None:
        if over < (len(chunks) + 1) * options.chunk:
            return
        chunk = {
            "requests": over,
            "wall_s": time.perf_counter() - started,
            "simulated_s": simulated_s,
            "nodes": len(simulation.cell.state.tree.nodes),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        chunks.append(chunk)
        print(
            f"{workers:4} workers {over:10,} requests {chunk['wall_s']:8.1f} s "
            f"{chunk['wall_s'] / over * 1e3:6.2f} ms each {chunk['nodes']:9,} nodes {chunk['peak_rss_mib']:7.0f} MiB",
            flush=True,
        )

    simulation.run(progress)
    wall_s = time.perf_counter() - started
    figures = simulation.figures()
    kept = (
        *("requests", "finished", "failed", "hit_ratio", "ttft_ms", "tpot_ms", "throughput", "simulated_seconds"),
        *("scheduler", "nodes", "steps", "batches"),
    )
    return {
        "workers": workers,
        "wall_s": wall_s,
        "cpu_s": time.process_time() - started_cpu,  # Less than wall time where others use the machine.
        "wall_ms_per_request": wall_s / figures["requests"] * 1e3,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "chunks": chunks,
        **{name: figures[name] for name in kept},
    }


def show(results: list[dict[str, Any]]) -> None:
    """The table: a row for each number of workers."""
    print(
        f"{'workers':>8} {'requests/s':>11} {'TTFT p50':>10} {'TTFT p99':>10} {'hits':>7} {'scheduler':>10} {'wall':>9}"
    )
    for one in results:
        print(
            f"{one['workers']:8} {one['throughput']['requests_per_s']:11.1f} {one['ttft_ms']['p50']:7.0f} ms "
            f"{one['ttft_ms']['p99']:7.0f} ms {one['hit_ratio']:7.3f} {one['scheduler']['busy_fraction']:9.1%} "
            f"{one['wall_s']:7.1f} s {one['cpu_s']:7.1f} s"
        )


def main() -> None:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--requests", type=int, default=1_000_000)
    known.add_argument("--workers", default="64", help="one number, or several with commas")
    known.add_argument("--chunk", type=int, default=50_000)
    known.add_argument("--rate-per-worker", type=float, default=2.0, help="sessions a second")
    known.add_argument("--device-tokens", type=int, default=200_000)
    known.add_argument("--hardware", default="a100-pcie4")
    known.add_argument("--model", default="llama-3.1-8b")
    known.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    known.add_argument("--seed", type=int, default=1)
    known.add_argument("--name", default="simulate_scale", help="of the results file")
    options = known.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    results = []
    for workers in options.workers.split(","):
        results.append(run(options, int(workers)))
        # After each, so that a run that is cut short leaves what it has.
        path = results_file.write(
            options.name, {"settings": [*SETTINGS, *options.settings], "runs": results}, seed=options.seed
        )
    show(results)
    print(path)


if __name__ == "__main__":
    main()
