"""What counting takes of a cell's CPU time: how often metrics are called for a token, times what a call takes.

    python -m bench.metric_calls [--requests 96] [--at-once 8] [--save]

Whole cells side by side cannot tell 1 % from nothing on shared cores. This can: in every
process of a cell the calls of counters, gauges and histograms are counted, those of idle time, too; a call of each is
timed in a loop; and the kernel says what CPU time a token took. Calls of ``labels`` are a part of that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import timeit
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from bench import results_file
from bench.caching_cost import ADMIN_KEY, Load, Way, one_turn
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

COUNT_CALLS = """
import atexit, json, os
import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

calls = {}

def counted(kind, name):
    found = getattr(kind, name)
    key = f"{kind.__name__}.{name}"
    calls[key] = 0
    def call(*args, **more):
        calls[key] += 1
        return found(*args, **more)
    setattr(kind, name, call)

for kind, name in (
    (prometheus_client.Counter, "inc"), (prometheus_client.Gauge, "inc"), (prometheus_client.Gauge, "dec"),
    (prometheus_client.Gauge, "set"), (prometheus_client.Histogram, "observe"), (MetricWrapperBase, "labels"),
):
    counted(kind, name)

@atexit.register
def write():
    with open(os.path.join(FOLDER, f"{os.getpid()}.json"), "w") as file:
        json.dump(calls, file)
"""
"""Python runs a module of the name sitecustomize in every process that finds one on its path."""

TIMED = 200_000


def seconds_a_call() -> dict[str, float]:
    """What each kind of call takes by itself, with two labels where there are labels."""
    registry = CollectorRegistry()
    counter = Counter("c", "c", registry=registry)
    gauge = Gauge("g", "g", registry=registry)
    histogram = Histogram("h", "h", registry=registry)
    labelled = Counter("l", "l", ("a", "b"), registry=registry)
    timed = {
        "Counter.inc": counter.inc,
        "Gauge.inc": gauge.inc,
        "Gauge.dec": gauge.dec,
        "Gauge.set": lambda: gauge.set(1.0),
        "Histogram.observe": lambda: histogram.observe(0.3),
        "MetricWrapperBase.labels": lambda: labelled.labels("one", "two"),
    }
    return {name: min(timeit.repeat(call, number=TIMED, repeat=3)) / TIMED for name, call in timed.items()}


def measure(load: Load, seed: int) -> dict[str, Any]:
    """Calls a token by kind, and the share of a token's CPU time that they take."""
    prompts = load.prompts(random.Random(seed), vocabulary=2000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(f"FOLDER = {name!r}\n{COUNT_CALLS}", "utf-8")
        path = os.pathsep.join((name, str(Path(__file__).parents[1])))
        settings = folder / "settings.toml"
        settings.write_text(f'[gateway]\nadmin_key = "{ADMIN_KEY}"\n', encoding="utf-8")
        config = SupervisorConfig(
            port=0, threads=1, dtype="float32", device_kv_bytes=64 * 2**20, host_kv_bytes=64 * 2**20
        )
        with running(config, config_file=settings, environ={"PYTHONPATH": path}) as cell:
            cpu_s = asyncio.run(one_turn(Way("counted", cell), load, prompts)).cpu_s
            processes = len(cell.pids())
        found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    if len(found) < processes - 1:  # The broker is no Python.
        raise SystemExit(f"only {len(found)} of {processes} processes wrote down their calls")
    cost_s = seconds_a_call()
    count = len(prompts) * load.answer_tokens
    calls = {kind: sum(one[kind] for one in found) / count for kind in cost_s}
    return {
        "requests": len(prompts),
        "at_once": load.at_once,
        "tokens_a_request": load.answer_tokens,
        "cpu_us_a_token": cpu_s * 1e6,
        "calls_a_token": calls,
        "us_a_call": {kind: seconds * 1e6 for kind, seconds in cost_s.items()},
        "share_of_cpu": sum(calls[kind] * cost_s[kind] for kind in calls) / cpu_s,
    }


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    load = Load("counted", options.requests, options.at_once, prompt_tokens=(80, 128), answer_tokens=options.tokens)
    found = measure(load, options.seed)
    for kind, count in found["calls_a_token"].items():
        print(f"{kind:26} {count:8.3f} a token, {found['us_a_call'][kind]:6.3f} us each")
    print(f"{found['share_of_cpu']:.3%} of {found['cpu_us_a_token']:.0f} us of CPU time a token")
    if options.save:
        print("->", results_file.write("metric_calls", found, seed=options.seed))


if __name__ == "__main__":
    main()
