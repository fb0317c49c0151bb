"""All parts of the GPU benchmark, one after the other, within a time: what a lent GPU is asked first.

    python -m bench.gpu [--minutes 10] [--quick | --cpu] [--only PART,...] [--out FILE]

Each part runs in a process of its own with its own share of the time, and can be run alone (``python -m
bench.gpu.PART``). One that fails is recorded with the end of what it printed, and the others go on. Everything goes
into one JSON file, by default ``bench/results/gpu.json``, and a table onto the screen. Needs no network. Exit code 1:
not every part ran to its end. Without a GPU nothing is measured, but ``--cpu`` shows that every part works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import results_file
from bench.gpu.part_process import STOP_S, Outcome, run_part
from bench.gpu.parts import PARTS, Allotment, Part, allot
from bench.gpu.reading import NO_DEVICE, NO_FIGURES, machine

RESERVE_S = STOP_S + 5.0
"""For a last part that has to be killed, for writing the file, and for what starts before the parts."""

TABLE_WIDTH = 160
"""Columns, where there is no terminal that has a width."""

LIBRARIES = ("triton", "transformers", "safetensors", "numpy", "nats-py")

Runner = Callable[[Part, Allotment], Outcome]


def run_all(parts: Sequence[Part], seconds: float, run: Runner, clock_s: Callable[[], float]) -> list[Outcome]:
    """Outcomes in the order of the parts; whatever one of them comes to, the next has its turn."""
    until_s = clock_s() + seconds
    outcomes = []
    for number, part in enumerate(parts):
        allotted = allot(part, parts[number + 1 :], max(0.0, until_s - clock_s()))
        if allotted is None:
            outcomes.append(Outcome(part.name, "left out", reason="there was no time left for it"))
        else:
            print(f"{part.name}: {part.question} ({allotted.share_s:.0f} s)", flush=True)
            outcomes.append(run(part, allotted))
    return outcomes


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """What people read."""
    table = Table("part", "what", "", "", title="GPU benchmark", title_justify="left")
    for outcome in outcomes:
        state = f"{outcome.part} ({outcome.state}, {outcome.seconds:.0f} s)"
        lines = outcome.results.get("headline", [])
        told = outcome.reason.strip().splitlines()
        # Of a part that failed the last line says why, of others the first.
        why = "" if not told else told[-1] if outcome.state == "failed" else told[0]
        table.add_row(state, why, "", "", style="bold")
        for name, value, unit in lines:
            table.add_row("", name, "-" if value is None else f"{value:.3g}", unit)
    return table


def document(outcomes: Sequence[Outcome], device: torch.device, *, minutes: float) -> dict[str, Any]:
    """What goes into the file."""
    versions = {name: _version(name) for name in LIBRARIES}
    return {
        **machine(device),
        **({"driver": _driver()} if device.type == "cuda" else {}),
        "libraries": versions,
        "minutes": minutes,
        "parts": {
            outcome.part: {
                "state": outcome.state,
                "seconds": round(outcome.seconds, 1),
                **({"reason": outcome.reason} if outcome.reason else {}),
                "results": outcome.results,
            }
            for outcome in outcomes
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if not options.cpu and not torch.cuda.is_available():
        print(f"{NO_DEVICE}; --cpu shows that the parts work")
        return 0
    if options.cpu:
        print(NO_FIGURES)
    flags = [f"--{name}" for name in ("quick", "cpu") if getattr(options, name)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thermocline-bench-") as folder:

        def run(part: Part, allotted: Allotment) -> Outcome:
            return run_part(part, allotted, flags, Path(folder))

        outcomes = run_all(parts, options.minutes * 60 - RESERVE_S, run, time.monotonic)
    found = document(outcomes, torch.device("cpu" if options.cpu else "cuda"), minutes=options.minutes)
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    Console(width=width).print(table_of(outcomes), highlight=False, markup=False)
    for outcome in outcomes:
        if outcome.reason and outcome.state != "left out":
            print(f"--- {outcome.part}: {outcome.reason}")
    if options.out is not None or not (options.quick or options.cpu or options.only):
        path = results_file.write("gpu", found, seed=0, out=options.out)
        print(f"written to {path.name}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(outcome.has_ended_well for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--minutes", type=_minutes, default=10.0, help="for everything together (default: 10)")
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run, is it right?")
    made.add_argument("--cpu", action="store_true", help="tiny, without a GPU, kernels interpreted: does it run?")
    made.add_argument("--only", type=_names, metavar="PART,...", help=", ".join(part.name for part in PARTS))
    made.add_argument("--out", type=Path, help="file; by default bench/results/gpu.json for a whole run, else none")
    return made


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError("must be above 0 and below a day")
    return minutes


def _names(text: str) -> list[str]:
    names, known = text.split(","), [part.name for part in PARTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version, as its own tool has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
