"""How many requests a second one scheduler carries with its default settings, in processor time.

The fold alone: a busy cell of many workers is simulated until its pools evict (:mod:`bench.recorded_load`); the inputs
of the next requests are then decoded, folded and their outputs encoded once more, each part timed in processor time of
the thread and summed by the kind of input. What a second of one core holds is the core's ceiling, sockets excluded.

Processor time grows where others use the same caches and the other thread of a core. A fixed piece of Python is timed
again and again meanwhile (``yardstick_ms``, the mean; 5 to 7 ms on two cores of an AMD EPYC that have little else to
do). It tells how loaded the machine was, and no more: the fold and it do not slow down alike.

``python -m bench.scheduler_rate [--trace FILE] [--profile FILE] [--requests 4000]``
"""

from __future__ import annotations

import cProfile
import gc
import statistics
import time
from pathlib import Path
from typing import Any

from bench import results_file
from bench.recorded_load import Load, Recorded, record
from services.scheduler import core
from services.scheduler.core import CancelTimer, SetTimer, Stamped
from services.scheduler.output_chain import Mark, OutputChain
from shared.codec import decode_input, encode
from shared.lifecycle import quiet_collector
from shared.messages.cell_events import CellConfig
from thermocline.simulate.__main__ import GC_THRESHOLDS

PARTS = ("decode", "fold", "encode")

_YARDSTICKS = 40


class Spent:
    """Processor time of one kind of input."""

    def __init__(self) -> None:
        self.parts_ns = [0] * len(PARTS)
        self.steps_ns: list[int] = []
        self.nbytes = 0

    def take(self, marks_ns: list[int], nbytes: int) -> None:
        """Four readings of the clock, around three parts."""
        for index in range(len(PARTS)):
            self.parts_ns[index] += marks_ns[index + 1] - marks_ns[index]
        self.steps_ns.append(marks_ns[3] - marks_ns[0])
        self.nbytes += nbytes

    def summary(self, requests: int) -> dict[str, float]:
        """Per request of the window, and per input."""
        ordered = sorted(self.steps_ns)
        count = len(ordered)
        return {
            "inputs_per_request": round(count / requests, 3),
            "ms_per_request": round(sum(ordered) / requests / 1e6, 4),
            **{
                f"{part}_ms_per_request": round(ns / requests / 1e6, 4)
                for part, ns in zip(PARTS, self.parts_ns, strict=True)
            },
            "ms_per_input": round(sum(ordered) / count / 1e6, 4),
            "p99_ms": round(ordered[min(count - 1, int(count * 0.99))] / 1e6, 3),
            "max_ms": round(ordered[-1] / 1e6, 3),
            "bytes_per_input": round(self.nbytes / count),
        }


def yardstick_ms() -> float:
    """Processor time of a fixed piece of work on a dictionary that is larger than a core's own caches."""
    table = {number * 7919 % 1_000_003: number for number in range(100_000)}
    began = time.thread_time_ns()
    total = 0
    for key in table:
        total += table.get(key * 31 % 1_000_003, 1)
    return (time.thread_time_ns() - began) / 1e6


def fold_again(
    recorded: Recorded, profile: cProfile.Profile | None = None, yardsticks: list[float] | None = None
) -> dict[str, Spent]:
    """Take the recorded inputs in once more. Raises SystemExit where the fold does not say what it said."""
    quiet_collector()
    state = core.decode_state(recorded.state)
    spent: dict[str, Spent] = {}
    chain = OutputChain(Mark())
    clock = time.thread_time_ns
    every = len(recorded.inputs) // _YARDSTICKS + 1
    for (seq, time_ns, data), expected in zip(recorded.inputs, recorded.outputs, strict=True):
        if yardsticks is not None and seq % every == 0:
            yardsticks.append(yardstick_ms())
        if profile is not None:
            profile.enable()
        began = clock()
        message = decode_input(data)
        decoded = clock()
        outputs = core.step(state, Stamped(seq, time_ns, message))
        folded = clock()
        bodies = [encode(one) for one in outputs if not isinstance(one, SetTimer | CancelTimer)]
        chain.add(seq, bodies)
        encoded = clock()
        if profile is not None:
            profile.disable()
        if bodies != expected:
            raise SystemExit(f"input {seq} ({type(message).__name__}) led to other outputs when it was folded again")
        spent.setdefault(type(message).__name__, Spent()).take([began, decoded, folded, encoded], len(data))
    return spent


def summary(spent: dict[str, Spent], requests: int) -> dict[str, Any]:
    """The table by kind, those that take most first, and all of them together."""
    together = Spent()
    for one in spent.values():
        together.steps_ns += one.steps_ns
        together.nbytes += one.nbytes
        together.parts_ns = [mine + theirs for mine, theirs in zip(together.parts_ns, one.parts_ns, strict=True)]
    kinds = {name: one.summary(requests) for name, one in spent.items()}
    ordered = sorted(kinds, key=lambda name: -kinds[name]["ms_per_request"])
    whole = together.summary(requests)
    return {
        "all": whole,
        "requests_per_s_of_one_core": round(1e3 / whole["ms_per_request"]),
        "kinds": {name: kinds[name] for name in ordered},
    }


def show(results: dict[str, Any]) -> None:
    """One line for each kind of input."""
    print(f"{'input':20} {'a request':>9} {'ms/request':>10} {'decode':>7} {'fold':>7} {'encode':>7} {'p99 ms':>7}")
    for name, row in {"all": results["all"], **results["kinds"]}.items():
        print(
            f"{name:20} {row['inputs_per_request']:9.2f} {row['ms_per_request']:10.3f} "
            f"{row['decode_ms_per_request']:7.3f} {row['fold_ms_per_request']:7.3f} "
            f"{row['encode_ms_per_request']:7.3f} {row['p99_ms']:7.2f}"
        )
    print(f"{results['requests_per_s_of_one_core']} requests a second of one core")


def main() -> None:
    defaults = Load()
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--trace", type=Path, default=None, help="trace in the Mooncake format; else conversations")
    parser.add_argument("--time-scale", type=float, default=1.0, help="divide the trace's times by this")
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--device-tokens", type=int, default=defaults.device_tokens)
    parser.add_argument("--rate-per-worker", type=float, default=defaults.rate, help="requests a second")
    parser.add_argument("--warm", type=int, default=defaults.warm)
    parser.add_argument("--requests", type=int, default=defaults.measured)
    parser.add_argument("--policy", default=defaults.config.policy, help="another one than the default")
    parser.add_argument("--profile", type=Path, default=None, help="write cProfile's figures of the fold there")
    parser.add_argument("--name", default="scheduler_rate", help="of the results file")
    options = parser.parse_args()
    load = Load(
        trace=options.trace,
        speed=options.time_scale,
        workers=options.workers,
        device_tokens=options.device_tokens,
        rate=options.rate_per_worker,
        warm=options.warm,
        measured=options.requests,
        seed=options.seed,
        config=CellConfig(policy=options.policy),
    )
    gc.set_threshold(*GC_THRESHOLDS)
    recorded = record(load)
    gc.collect()
    if options.profile is not None:
        profile = cProfile.Profile(time.thread_time)
        fold_again(recorded, profile)
        profile.dump_stats(options.profile)
        return
    yardsticks: list[float] = []
    results = summary(fold_again(recorded, yardsticks=yardsticks), options.requests)
    show(results)
    yardstick = statistics.fmean(yardsticks)
    print(f"yardstick {yardstick:.1f} ms")
    settings = {
        "policy": options.policy,
        "workers": load.workers,
        "device_tokens": load.device_tokens,
        "warm": load.warm,
    }
    figures = {"yardstick_ms": round(yardstick, 2), **results}
    written = {"settings": settings, "cell": recorded.figures, **figures}
    print(results_file.write(options.name, written, seed=options.seed))


if __name__ == "__main__":
    main()
