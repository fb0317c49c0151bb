"""What ``copies_at_rest`` costs or gains where no worker dies, in simulation.

Each workload runs without copies at rest, with them and, as a measure of chance, without them on a device that is one
page larger: a run that differs in one event soon differs in all. Reported are the prompt tokens that had to be computed
and the mean time to the first token, both relative to the run without; below 1 is better. Copies at rest are free of
cost as far as their ratios are not further from 1 than those of chance.

``python -m bench.copies_at_rest [--requests 400] [--seeds 3,4,5,7,8] [--save]``
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench import results_file
from services.scheduler.policies import thermocline  # noqa: F401  It registers the default policy.
from shared.messages.cell_events import CellConfig
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import WORKLOADS, make_workload

HARDWARE, MODEL = "h800", "llama-3.1-8b"
PAGE_SIZE = 16
RATES: dict[str, float | None] = {"agents": None, "chat": 1.0, "documents": 2.0, "few-shot": 2.0}
"""Requests (or sessions) a second, so that workers are idle now and then; agents have times of their own."""
POOLS = {
    "50k + host 50k": (50_000, 50_000, 0),
    "50k + host 150k": (50_000, 150_000, 0),
    "50k + host 100k + disk": (50_000, 100_000, 1_000_000),
}
RUNS = {"without": (False, 0), "with": (True, 0), "chance": (False, PAGE_SIZE)}
"""Whether copies are made at rest, and how many tokens the device holds more."""


def simulated(name: str, pool: tuple[int, int, int], seed: int, requests: int, run: tuple[bool, int]) -> dict[str, Any]:
    """One run: computed prompt tokens, mean TTFT in ms, and pages that were copied at rest."""
    copies_at_rest, more_tokens = run
    setup = Setup(
        hardware=load_hardware(HARDWARE),
        model=load_model(MODEL),
        config=CellConfig(copies_at_rest=copies_at_rest),
        page_size=PAGE_SIZE,
        device_tokens=pool[0] + more_tokens,
        host_tokens=pool[1],
        disk_tokens=pool[2],
        rate=RATES[name],
        requests=requests,
        seed=seed,
    )
    options, _ = WORKLOADS[name]
    simulation = Simulation(setup, make_workload(name, options(), seed))
    simulation.run()
    figures = simulation.figures()
    return {
        "computed_tokens": figures["computed_tokens"],
        "hit_ratio": figures["hit_ratio"],
        "mean_ttft_ms": simulation.cell.figures.ttft_ms.mean,
        "copied_pages": simulation.cell.state.counters.get("copied_at_rest_pages", 0),
    }


def summed_up(cases: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Geometric mean, spread (standard deviation of logarithms) and worst of one run's ratios over ``without``."""
    found = {}
    for figure in ("computed_tokens", "mean_ttft_ms"):
        logs = [math.log(case["runs"][kind][figure] / case["runs"]["without"][figure]) for case in cases]
        found[f"{figure}_mean"] = math.exp(statistics.fmean(logs))
        found[f"{figure}_spread"] = statistics.pstdev(logs)
        found[f"{figure}_worst"] = math.exp(max(logs))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.copies_at_rest", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", default="3,4,5,7,8")
    parser.add_argument("--workloads", default=",".join(RATES))
    parser.add_argument("--save", action="store_true", help="write bench/results/copies_at_rest.json")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = []
    for name in options.workloads.split(","):
        for pool_name, pool in POOLS.items():
            for seed in seeds:
                runs = {kind: simulated(name, pool, seed, options.requests, run) for kind, run in RUNS.items()}
                cases.append({"workload": name, "pool": pool_name, "seed": seed, "runs": runs})
            some = [case for case in cases if (case["workload"], case["pool"]) == (name, pool_name)]
            for kind in ("with", "chance"):
                ratios = {key: round(value, 3) for key, value in summed_up(some, kind).items()}
                print(name, pool_name, kind, ratios, flush=True)
    summary = {kind: summed_up(cases, kind) for kind in ("with", "chance")}
    print(summary)
    if options.save:
        results = {"requests": options.requests, "seeds": seeds, "summary": summary, "cases": cases}
        print(results_file.write("copies_at_rest", results, seed=seeds[0]))


if __name__ == "__main__":
    main()
