"""All parts of the GPU benchmark, one after the other, within a time: what a lent GPU is asked first.

    python -m bench.gpu [--minutes 8] [--quick | --cpu] [--only PART,...] [--out FILE]
    python -m bench.gpu --summary FILE

Each part runs in a process of its own with its own share of the time, and can be run alone (``python -m
bench.gpu.PART``). One that fails is recorded with the end of what it printed, and the others go on. Everything goes
into one JSON file, by default ``bench/results/gpu.json``, which is complete after every part, and a table onto the
screen, also where a signal ends the run; ``--summary`` prints it from the file, of a run that was killed too. Needs no
network. Exit code 1: not every part ran to its end. Without a GPU nothing is measured, but ``--cpu`` shows that every
part works.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.gpu.evidence import EvidenceFile, is_whole, read, table_of
from bench.gpu.part_process import STOP_S, Outcome, run_part
from bench.gpu.parts import PARTS, Allotment, Part, allot
from bench.gpu.reading import NO_DEVICE, NO_FIGURES
from bench.gpu.stopping import Stopped, stoppable
from bench.results_file import RESULTS

MINUTES = 8.0

RESERVE_S = STOP_S + 5.0
"""For a last part that has to be killed, for writing the file, and for what starts before the parts."""

TABLE_WIDTH = 160
"""Columns, where there is no terminal that has a width."""

Runner = Callable[[Part, Allotment], Outcome]

Keeper = Callable[[Sequence[Outcome], Sequence[Part]], object]
"""Writes down what has ended and what is still to come, the first of which begins."""


def run_all(
    parts: Sequence[Part], seconds: float, run: Runner, clock_s: Callable[[], float], keep: Keeper
) -> list[Outcome]:
    """Outcomes in the order of the parts; whatever one of them comes to, the next has its turn. Where the run is
    stopped, those that are left have none.
    """
    until_s = clock_s() + seconds
    outcomes: list[Outcome] = []
    try:
        for number, part in enumerate(parts):
            keep(outcomes, parts[number:])
            allotted = allot(part, parts[number + 1 :], max(0.0, until_s - clock_s()))
            if allotted is None:
                outcomes.append(Outcome(part.name, "left out", reason="there was no time left for it"))
                continue
            print(f"{part.name}: {part.question} ({allotted.share_s:.0f} s)", flush=True)
            outcomes.append(run(part, allotted))
            if outcomes[-1].state == "stopped":
                break
    except Stopped as stopped:
        print(stopped, flush=True)
    rest = parts[len(outcomes) :]
    return outcomes + [Outcome(part.name, "left out", reason="the run was stopped") for part in rest]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.summary is not None:
        return _summarise(options.summary)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if not options.cpu and not torch.cuda.is_available():
        print(f"{NO_DEVICE}; --cpu shows that the parts work")
        return 0
    if options.cpu:
        print(NO_FIGURES)
    flags = [f"--{name}" for name in ("quick", "cpu") if getattr(options, name)]
    is_kept = options.out is not None or not (options.quick or options.cpu or options.only)
    out: Path | None = (options.out or RESULTS / "gpu.json") if is_kept else None
    began = time.monotonic()
    with stoppable(), tempfile.TemporaryDirectory(prefix="thermocline-bench-") as scratch:
        device = torch.device("cpu" if options.cpu else "cuda")
        evidence = EvidenceFile(out, device, options.minutes, Path(scratch))
        outcomes = run_all(
            parts,
            options.minutes * 60 - RESERVE_S,
            lambda part, allotted: run_part(part, allotted, flags, evidence.folder),
            time.monotonic,
            lambda ended, waiting: evidence.write(ended, waiting, running=True),
        )
        found = evidence.write(outcomes, (), running=False)
        _print(found)
        evidence.close()
    if out is not None:
        print(f"written to {out.name}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if is_whole(found) else 1


def _summarise(file: Path) -> int:
    try:
        found = read(file)
    except (OSError, ValueError, KeyError) as error:
        print(f"{file.name} is no file of this benchmark: {error}", file=sys.stderr)
        return 2
    _print(found)
    return 0 if is_whole(found) else 1


def _print(found: dict[str, Any]) -> None:
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    Console(width=width).print(table_of(found), highlight=False, markup=False)
    for name, part in found["parts"].items():
        if part.get("reason") and part["state"] != "left out":
            print(f"--- {name}: {part['reason']}")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--minutes", type=_minutes, default=MINUTES, help=f"for everything together (default: {MINUTES:g})"
    )
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run, is it right?")
    made.add_argument("--cpu", action="store_true", help="tiny, without a GPU, kernels interpreted: does it run?")
    made.add_argument("--only", type=_names, metavar="PART,...", help=", ".join(part.name for part in PARTS))
    made.add_argument("--out", type=Path, help="file; by default bench/results/gpu.json for a whole run, else none")
    made.add_argument("--summary", type=Path, metavar="FILE", help="print what is in a file, and measure nothing")
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


if __name__ == "__main__":
    sys.exit(main())
