"""``thermocline chaos``: faults on a running cell under load, with a check of every answer."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from shared import logs
from shared.arguments import ArgumentParser, add_old_name, with_new_json
from shared.errors import OperatorError, ThermoclineError
from shared.guard import guarded
from shared.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from shared.model_folder import check_model, find_model
from shared.result_file import check_writable, write_result
from thermocline.chaos.journal import Journal
from thermocline.chaos.plan import PAUSE_S
from thermocline.chaos.report import check_memory, print_summary, summary
from thermocline.chaos.run import run
from thermocline.chaos.settings import ChaosSettings
from thermocline.flags import add_json
from thermocline.supervisor.leftovers import reap_dead_cells
from thermocline.supervisor.records import runs_dir

_DESCRIPTION = """Start a whole cell, load it through its HTTP API, and inject faults: processes die, freeze and come
back, connections to the broker stall, break and are refused, the disk fills up and chunks are damaged. Every answer is
compared with that of the same request without faults. A seed decides which faults come and when."""


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline chaos", description=_DESCRIPTION)
    made.add_argument("--seed", type=int, default=1, metavar="N", help="seed of faults, requests and arrivals")
    made.add_argument(
        "--faults", type=int, metavar="N", help="faults to inject (default: 60, or what --minutes allows); 0: none"
    )
    made.add_argument("--minutes", type=float, metavar="X", help="stop after X minutes")
    made.add_argument("--workers", type=int, default=2, metavar="N", help="workers of the cell")
    made.add_argument(
        "--schedulers", type=int, default=1, metavar="N", help="schedulers of the cell; all but one are standbys"
    )
    made.add_argument(
        "--requests-per-s", type=float, default=4.0, metavar="R", help="open loop: requests a second, on average"
    )
    concurrency = made.add_argument(
        "--concurrency",
        type=int,
        default=16,
        metavar="N",
        help="at most N requests at once; further arrivals are skipped",
    )
    add_old_name(made, "--max-in-flight", concurrency)
    made.add_argument("--pause", type=float, default=PAUSE_S, metavar="S", help="mean seconds between two faults")
    made.add_argument("--round", type=int, default=50, metavar="N", help="faults between two checks of the idle cell")
    made.add_argument("--questions", type=int, default=64, metavar="N", help="distinct conversations that are asked")
    made.add_argument("--model", default="", metavar="DIR", help="model folder (default: the bundled model)")
    add_json(made)
    made.add_argument("--out", type=Path, metavar="FILE", help="write all figures to FILE")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run. Exit codes: 0 no violation, 1 a violation, a failed cell or an interruption, 2 bad flags."""
    options = parser().parse_args(with_new_json(sys.argv[1:] if argv is None else argv, "thermocline chaos"))
    console = Console(soft_wrap=True, stderr=options.json)
    try:
        settings = _settings(options)
        if options.model:
            check_model(find_model(options.model))
        if options.out is not None:
            check_writable(options.out)
    except OperatorError as error:
        print(f"thermocline chaos: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    logs.configure("supervisor", "chaos", level="error")
    reap_dead_cells(runs_dir())
    folder = Path(tempfile.mkdtemp(prefix="thermocline-chaos-"))
    return _run(settings, folder, options, console)


def _settings(options: argparse.Namespace) -> ChaosSettings:
    faults = options.faults
    if faults is None:
        faults = 60 if options.minutes is None or options.pause <= 0 else int(options.minutes * 60 / options.pause)
    return ChaosSettings(
        seed=options.seed,
        faults=faults,
        minutes=options.minutes,
        workers=options.workers,
        schedulers=options.schedulers,
        requests_per_s=options.requests_per_s,
        max_in_flight=options.concurrency,
        pause_s=options.pause,
        round_faults=options.round,
        questions=options.questions,
        model=options.model,
    )


def _run(settings: ChaosSettings, folder: Path, options: argparse.Namespace, console: Console) -> int:
    journal = Journal(folder / "timeline.jsonl", console)
    try:
        outcome = run(settings, folder, journal)
        check_memory(outcome, journal)
    except (ThermoclineError, httpx.HTTPError, ExceptionGroup) as error:
        console.print(f"thermocline chaos: {error}; logs of all processes are in {folder}", style="red", markup=False)
        return EXIT_FAILED
    except KeyboardInterrupt:
        console.print(f"thermocline chaos: stopped before its end; logs of all processes are in {folder}")
        return EXIT_FAILED
    finally:
        journal.close()
    figures = summary(outcome, journal)
    if options.json:
        print(json.dumps(figures))
    else:
        print_summary(console, figures)
    is_written = options.out is None or _write(options.out, figures, console)
    if not journal.violations:
        shutil.rmtree(folder, ignore_errors=True)
        return EXIT_OK if is_written else EXIT_FAILED
    for violation in journal.violations:
        console.print(str(violation), style="red", markup=False)
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"{len(journal.violations)} violations with seed {settings.seed}; the timeline and the logs of all processes "
        f"are in {folder}",
        style="red",
        markup=False,
    )
    return EXIT_FAILED


def _write(path: Path, figures: dict[str, Any], console: Console) -> bool:
    """Write the figures; return whether that succeeded, and print why not."""
    try:
        write_result(path, f"{json.dumps(figures, indent=2)}\n".encode())
    except OperatorError as error:
        console.print(f"thermocline chaos: {error.message}", style="red", markup=False)
        return False
    return True


if __name__ == "__main__":
    sys.exit(guarded(main))
