"""Run many seeds: ``python -m tests.simulation --seeds 0-9999 --jobs 2``. Exits with 1 if a property broke."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe, Process, connection
from pathlib import Path

from bench import results_file
from tests.simulation.running import Outcome, run_seed
from tests.simulation.shrinking import shrink
from tests.simulation.summary import Summary

SHOWN = 3
"""Seeds that are told of each defect."""

Connection = connection.Connection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    options = _parser().parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    begun_s = time.monotonic()
    summary = Summary()
    for outcome in _outcomes(seeds, options.jobs):
        if summary.add(outcome):
            tell(shrink(outcome) if options.shrink else outcome)
        if len(summary.defects) >= options.stop_after:
            break
    wall_s = time.monotonic() - begun_s
    results = summary.results(wall_s)
    print(f"{summary.seeds} seeds, {summary.inputs} inputs, {results['seeds_per_minute']} seeds a minute")
    endings = ", ".join(f"{name} {number}" for name, number in results["endings"].items())
    print(f"requests ended with: {endings}")
    for title, reached in results["reached"].items():
        if not reached["times"]:
            print(f"never reached: {title}")
    for signature, found in results["violated"].items():
        print(f"BROKEN by {len(found)} seeds, such as {found[:SHOWN]}: {signature}")
    if options.json is not None:
        results_file.write("simulated_faults", results, seed=seeds.start, out=options.json)
    return 1 if summary.defects else 0


def tell(outcome: Outcome) -> None:
    """Everything that is needed to reproduce a failure."""
    scenario = outcome.scenario
    print(f"\nseed {scenario.seed}: {outcome.broken}\n  found in {outcome.where}")
    print(f"  reproduce: python -m tests.simulation --seeds {scenario.seed} --shrink")
    print(f"  {scenario.config}\n  {scenario.shape}\n  {scenario.rates}")
    print(f"  {len(scenario.arrivals)} requests; faults:")
    for fault in scenario.faults:
        print(f"    {fault}")
    print("  last inputs:")
    for line in outcome.last_inputs:
        print(f"    {line[:240]}")
    sys.stdout.flush()


def _outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    """Every seed's outcome, as they come. Processes take turns at the seeds; each says one outcome at a time."""
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    receivers, processes = [], []
    for job in range(jobs):
        receiver, sender = Pipe(duplex=False)
        process = Process(target=_work, args=(seeds[job::jobs], sender), daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        while receivers:
            for ready in connection.wait(receivers):
                assert isinstance(ready, Connection)
                try:
                    yield ready.recv()
                except EOFError:
                    receivers.remove(ready)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    if any(process.exitcode for process in processes if process.exitcode != -15):
        raise RuntimeError("a process that runs seeds died")


def _work(seeds: Sequence[int], sender: Connection) -> None:
    for seed in seeds:
        sender.send(run_seed(seed))
    sender.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0-199", help="one seed, or the first and the last: 0-9999")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    parser.add_argument("--shrink", action="store_true", help="make the first scenario of each defect smaller")
    parser.add_argument("--json", type=Path, help="write what the seeds came to into this file")
    parser.add_argument("--stop-after", type=int, default=10, help="different defects after which to stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
