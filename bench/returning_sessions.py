"""What it gains that agents say when they will go on (``cache.returns_in_s``), in simulation.

The generator of agents, whose tools take exponential times, on seeds that are held out: no choice was made by them. Of
the steps after which a session goes on, none, half or all say in how many seconds, with a log-normal error of spread
0.5; in ``wrong`` all say, with one of spread 2, so that every other is off by four times or more. Reported are the
prompt tokens that had to be computed and the mean time to the first token, both relative to the same run without hints;
below 1 is better.

``python -m bench.returning_sessions [--sessions 120] [--seeds 48,54,60]``
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from bench import results_file
from bench.held_out import is_held_out
from services.scheduler.policies import thermocline  # noqa: F401  It registers the default policy.
from shared.messages.cell_events import CellConfig
from thermocline.simulate.profiles import load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import make_workload
from thermocline.simulate.workloads.agents import AgentOptions

HARDWARE, MODEL = "h800", "llama-3.1-8b"
POOLS = {
    "device 50k": (50_000, 0),
    "device 100k": (100_000, 0),
    "device 200k": (200_000, 0),
    "50k + host 100k": (50_000, 100_000),
}
POLICIES = ("thermocline", "lru")
HINTS = {"half": (0.5, 0.5), "all": (1.0, 0.5), "wrong": (1.0, 2.0)}
NO_HINTS = (0.0, 0.5)


def simulated(
    policy: str, pool: tuple[int, int], seed: int, sessions: int, hints: tuple[float, float]
) -> dict[str, float]:
    """One run: computed prompt tokens, mean TTFT, and what became of hints."""
    hinting, error = hints
    setup = Setup(
        hardware=load_hardware(HARDWARE),
        model=load_model(MODEL),
        config=CellConfig(policy=policy),
        device_tokens=pool[0],
        host_tokens=pool[1],
        seed=seed,
    )
    options = AgentOptions(sessions=sessions, hinting=hinting, hint_error=error)
    simulation = Simulation(setup, make_workload("agents", options, seed))
    simulation.run()
    figures, counters = simulation.cell.figures, simulation.cell.state.counters
    return {
        "computed_tokens": figures.input_tokens - figures.device_tokens - figures.host_tokens,
        "input_tokens": figures.input_tokens,
        "mean_ttft_ms": figures.ttft_ms.mean,
        **{name: counters.get(name, 0) for name in ("returns_met", "returns_late", "returns_given_up")},
    }


def compared(policy: str, pool: tuple[int, int], seed: int, sessions: int) -> dict[str, Any]:
    """Runs with hints beside the one without."""
    without = simulated(policy, pool, seed, sessions, NO_HINTS)
    found: dict[str, Any] = {"without": without}
    for name, hints in HINTS.items():
        run = simulated(policy, pool, seed, sessions, hints)
        found[name] = run | {
            "computed_ratio": run["computed_tokens"] / without["computed_tokens"],
            "ttft_ratio": run["mean_ttft_ms"] / without["mean_ttft_ms"],
        }
    return found


def summed_up(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and the worst case of each kind of hints."""
    summary = {}
    for name in HINTS:
        for ratio in ("computed_ratio", "ttft_ratio"):
            values = [case["runs"][name][ratio] for case in cases]
            mean = math.exp(sum(map(math.log, values)) / len(values))
            summary[f"{name}_{ratio}"] = {"mean": mean, "best": min(values), "worst": max(values)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--seeds", default="48,54,60")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = []
    for policy in POLICIES:
        for pool_name, pool in POOLS.items():
            for seed in seeds:
                runs = compared(policy, pool, seed, options.sessions)
                cases.append({"policy": policy, "pool": pool_name, "seed": seed, "runs": runs})
                ratios = {name: round(runs[name]["computed_ratio"], 3) for name in HINTS}
                print(policy, pool_name, seed, ratios, flush=True)
    summary = {policy: summed_up([case for case in cases if case["policy"] == policy]) for policy in POLICIES}
    shape = {"sessions": options.sessions, "held_out": all(is_held_out("agents", seed) for seed in seeds)}
    print(results_file.write("returning_sessions", shape | {"summary": summary, "cases": cases}, seed=seeds[0]))


if __name__ == "__main__":
    main()
