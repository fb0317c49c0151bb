"""``thermocline simulate``: the scheduler's real core under virtual time, with modelled hardware.

The workload comes from a trace (``--trace``) or a seeded generator (``--workload``), else from a sample trace; hardware
and model from bundled profiles or from TOML files. The same arguments give the same figures, except the wall time.
``--sweep`` runs every combination of the values of some settings.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from services.scheduler.core.cache.page_pool import MOST_PAGES
from shared.arguments import JSON_HELP, ArgumentParser, add_old_name
from shared.errors import ConfigError, InvalidRequest, OperatorError
from shared.guard import EXIT_INTERRUPTED, guarded
from thermocline.flags import policies_line
from thermocline.simulate.profiles import hardware_names, load_hardware, load_model, model_names
from thermocline.simulate.report import show
from thermocline.simulate.settings import divide
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.sweep_report import FIGURES
from thermocline.simulate.workloads import WORKLOADS, TraceWorkload, Workload, make_workload
from thermocline.simulate.workloads.chat import ChatOptions
from thermocline.trace.format import SAMPLE

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

DEFAULT_IN_FLIGHT = 128  # Strata 5.1.
DEFAULT_HARDWARE, DEFAULT_MODEL = "a100-pcie4", "llama-3.1-8b"

MOST_WORKERS, MOST_PAGE_TOKENS, MOST_DISK_TOKENS = 10_000, 2**20, 2**50
LEAST_RATE = 1e-9
"""Bounds within which every time is a number, and every pool one that the core accepts."""

# Most objects live long here, and repeated scans of all of them would take a third of the time.
GC_THRESHOLDS = (200_000, 50, 1000)


_DESCRIPTION = """Run the scheduler's real core under virtual time, on modelled hardware.

The workload comes from a trace or a seeded generator, else from a sample trace; hardware and model from profiles,
bundled or in TOML files. The same arguments give the same figures, except the wall time. --sweep runs every combination
of the values of some settings."""


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    known = ArgumentParser(prog="thermocline simulate", description=_DESCRIPTION, epilog=policies_line())
    asked = known.add_mutually_exclusive_group()
    asked.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace in the Mooncake format (default: a sample trace)"
    )
    asked.add_argument("--workload", metavar="NAME", help=f"generator: {', '.join(WORKLOADS)}")
    hardware, models = ", ".join(hardware_names()), ", ".join(model_names())
    known.add_argument("--hardware", metavar="NAME", help=f"{hardware}, or a .toml file (default: {DEFAULT_HARDWARE})")
    known.add_argument("--model", metavar="NAME", help=f"{models}, or a .toml file (default: {DEFAULT_MODEL})")
    known.add_argument("--profile", metavar="HARDWARE[/MODEL]", help="hardware and model in one")
    known.add_argument("--policy", metavar="NAME", help="eviction policy: a name, or module:Class of your own")
    known.add_argument("--workers", type=int, default=1, metavar="N", help="workers")
    known.add_argument("--workers-per-node", type=int, default=8, metavar="N", help="workers that share host memory")
    known.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices of each worker")
    known.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens of a page")
    known.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="type of K and V on every tier")
    known.add_argument("--device-tokens", type=int, metavar="N", help="KV of each worker (default: what fits)")
    known.add_argument("--host-tokens", type=int, metavar="N", help="host KV of each node (default: what fits)")
    known.add_argument("--disk-tokens", type=int, default=0, metavar="N", help="KV on the disk of each node")
    known.add_argument(
        "--network-gb-s",
        type=float,
        default=0.0,
        metavar="X",
        help="GB/s at which nodes read one another's host KV; 0: they do not",
    )
    known.add_argument("--io", choices=("assisted", "per-page"), default="assisted", help="how pages are copied")
    known.add_argument("--backup-share", type=float, default=1.0, metavar="X", help="share of a link for backups")
    known.add_argument("--requests", type=int, metavar="N", help="stop after N requests")
    known.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests (or sessions) a second")
    concurrency = known.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="at most N requests (or sessions) at once; without --rate a closed loop",
    )
    add_old_name(known, "--in-flight", concurrency)
    scale = known.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="divide recorded times by X")
    add_old_name(known, "--speed", scale)
    known.add_argument("--seed", type=int, default=1, metavar="N", help="seed of workload and arrivals")
    known.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="cell setting or workload option",
    )
    _add_sweep_flags(known)
    known.add_argument("--json", action="store_true", help=JSON_HELP)
    return known


def _add_sweep_flags(known: argparse.ArgumentParser) -> None:
    swept = known.add_argument_group("sweeps")
    swept.add_argument(
        "--sweep",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=A,B",
        help="simulate every combination: of flags without dashes, capacity (device_tokens) and keys of --set",
    )
    swept.add_argument(
        "--jobs", type=int, metavar="N", help="processes at once, at most one per core (default: one per core)"
    )
    swept.add_argument("--csv", type=Path, metavar="FILE", help="write every figure of every simulation")
    swept.add_argument("--parquet", type=Path, metavar="FILE", help="likewise; needs thermocline[parquet]")
    swept.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG over the first numbers in --sweep")
    swept.add_argument(
        "--plot-figure",
        choices=tuple(FIGURES),
        default="hit_ratio",
        metavar="NAME",
        help=f"figure to plot: {', '.join(FIGURES)}",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with the sample trace by default. Raises SystemExit (2) for an invalid command line."""
    options: argparse.Namespace = parser().parse_args(list(argv))
    if options.trace is None and options.workload is None:
        options.trace = SAMPLE
    return options


def prepare(options: argparse.Namespace) -> Simulation:
    """Return a simulation that is ready to run. Raises ConfigError that names every fault of the flags."""
    _check_numbers(options)
    hardware, model = _profiles(options)
    struct = None
    if options.workload is not None:
        if options.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {options.workload!r}; known are {', '.join(WORKLOADS)}")
        struct = WORKLOADS[options.workload][0]
    config, own = divide(options.settings, struct, policy=options.policy)
    in_flight = options.concurrency
    if in_flight is None and options.workload is not None and options.rate is None:
        in_flight = DEFAULT_IN_FLIGHT
    setup = Setup(
        hardware=load_hardware(hardware),
        model=msgspec.structs.replace(load_model(model), kv_dtype=options.kv_dtype),
        config=config,
        workers=options.workers,
        workers_per_node=options.workers_per_node,
        tensor_parallel=options.tensor_parallel,
        page_size=options.page_size,
        device_tokens=options.device_tokens,
        host_tokens=options.host_tokens,
        disk_tokens=options.disk_tokens,
        network_gb_s=options.network_gb_s,
        io=options.io,
        backup_share=options.backup_share,
        rate=options.rate,
        in_flight=in_flight,
        requests=options.requests,
        seed=options.seed,
    )
    return Simulation(setup, _workload(options, own))


def _check_numbers(options: argparse.Namespace) -> None:
    faults = []
    most_tokens = MOST_PAGES * min(max(1, options.page_size), MOST_PAGE_TOKENS)
    for name, least, most in (
        ("workers", 1, MOST_WORKERS),
        ("workers-per-node", 1, MOST_WORKERS),
        ("tensor-parallel", 1, MOST_WORKERS),
        ("page-size", 1, MOST_PAGE_TOKENS),
        ("device-tokens", 1, most_tokens),
        ("host-tokens", 0, most_tokens),
        ("disk-tokens", 0, MOST_DISK_TOKENS),
        ("requests", 1, None),
        ("concurrency", 1, None),
        ("jobs", 1, None),
    ):
        value = getattr(options, name.replace("-", "_"))
        if value is not None and value < least:
            faults.append(f"--{name} must be at least {least}")
        if value is not None and most is not None and value > most:
            faults.append(f"--{name} must be at most {most:,}")
    for name, also in (("rate", ""), ("time-scale", ""), ("network-gb-s", "0, or ")):
        value = getattr(options, name.replace("-", "_"))
        if value is None or (also and not value):
            continue
        if not isfinite(value):
            faults.append(f"--{name} must be {also}a finite number, and not {value:g}")
        elif value < LEAST_RATE:
            faults.append(f"--{name} must be {also}at least {LEAST_RATE:g}")
    if not LEAST_RATE <= options.backup_share <= 1:
        faults.append(f"--backup-share must be from {LEAST_RATE:g} to 1")
    if faults:
        raise ConfigError("; ".join(faults))


def _profiles(options: argparse.Namespace) -> tuple[str, str]:
    """Return the names of hardware and model from --hardware and --model, or from --profile, or the defaults."""
    hardware, model = options.hardware, options.model
    if options.profile is not None:
        whole, slash, rest = options.profile.partition("/")
        if options.profile.endswith(".toml"):
            whole, slash, rest = options.profile, "", ""
        hardware = hardware or whole
        model = model or (rest if slash else None)
    return hardware or DEFAULT_HARDWARE, model or DEFAULT_MODEL


def _workload(options: argparse.Namespace, own: msgspec.Struct | None) -> Workload:
    if options.trace is not None:
        is_timed = options.rate is None and options.concurrency is None
        return TraceWorkload(options.trace, limit=options.requests, is_timed=is_timed, speed=options.time_scale)
    assert own is not None
    if isinstance(own, ChatOptions) and not own.sessions and options.requests is None:
        raise ConfigError("this workload never ends: give --requests or --set sessions=N")
    return make_workload(options.workload, own, options.seed)


def run(simulation: Simulation) -> dict[str, Any]:
    """Run with a progress line on standard error where that is a terminal; return the figures.

    After Ctrl-C they are those of the requests so far, and ``interrupted`` is among them; without one it passes.
    """
    interruption: dict[str, Any] = {}
    started = time.perf_counter()
    wanted = simulation.setup.requests
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[over]} requests, {task.fields[virtual]} simulated"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, over="0", virtual="0 s")

        def progress(over: int, seconds: float) -> None:
            of = f" of {wanted:,}" if wanted else ""
            bar.update(task, over=f"{over:,}{of}", virtual=f"{seconds:,.0f} s")

        try:
            simulation.run(progress)
        except KeyboardInterrupt:
            if not simulation.ended:
                raise
            interruption = {"interrupted": True}
    figures = simulation.figures()
    if not figures["requests"]:
        raise InvalidRequest("the workload holds no request")
    return figures | {"wall_seconds": time.perf_counter() - started} | interruption


def described(options: argparse.Namespace, simulation: Simulation) -> dict[str, Any]:
    """Return the settings of a simulation, for the report: workload, profiles, policy, sizes and seed."""
    setup = simulation.setup
    return {
        "workload": options.workload or ("sample trace" if options.trace == SAMPLE else str(options.trace)),
        "hardware": setup.hardware.name,
        "model": setup.model.name,
        "policy": setup.config.policy,
        "workers": setup.workers,
        "page_size": setup.page_size,
        "device_tokens": simulation.shape.device_tokens,
        "host_tokens": simulation.shape.host_tokens,
        "disk_tokens": simulation.shape.disk_tokens,
        "io": setup.io,
        "seed": setup.seed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a simulation or a sweep.

    Exit codes: 0 done, 1 a simulation failed, 2 invalid flags, profile or trace, 130 interrupted.
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        if options.sweep:
            from thermocline.simulate.sweep_command import run_sweep

            return EXIT_OK if run_sweep(options) else EXIT_FAILED
        if options.csv or options.parquet or options.plot:
            raise ConfigError("--csv, --parquet and --plot write the figures of --sweep; give --sweep")
        simulation = prepare(options)
        figures = run(simulation)
    except (OperatorError, InvalidRequest) as error:
        print(f"thermocline simulate: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    if simulation.warning is not None:
        print(f"thermocline simulate: {simulation.warning}", file=sys.stderr)
    is_interrupted = "interrupted" in figures
    if is_interrupted:
        print(f"thermocline simulate: interrupted; {simulation.ended:,} requests ended", file=sys.stderr)
    about, setup = described(options, simulation), simulation.setup
    if options.json:
        print(json.dumps(about | figures))
    else:
        title = f"{about['workload']} on {setup.workers} x {setup.hardware.name}, {setup.model.name}"
        show(Console(), figures, f"{title}, {setup.config.policy}, seed {setup.seed}")
    return EXIT_INTERRUPTED if is_interrupted else EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
