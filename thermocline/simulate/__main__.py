"""``thermocline simulate``: the scheduler's real core under virtual time, with modelled hardware.

Workload from a trace (``--trace``) or a seeded generator (``--workload``); hardware and model from profiles that
come along or from TOML files. The same arguments give the same figures, but for the time that it took.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shared.errors import ConfigError, InvalidRequest, OperatorError
from shared.guard import guarded
from thermocline.simulate.profiles import hardware_names, load_hardware, load_model, model_names
from thermocline.simulate.report import show
from thermocline.simulate.settings import divide
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.workloads import WORKLOADS, TraceWorkload, Workload, make_workload
from thermocline.simulate.workloads.chat import ChatOptions

EXIT_OK, EXIT_USAGE = 0, 2

DEFAULT_IN_FLIGHT = 128  # Strata 5.1.

# Most objects live long here, and looking at all of them again and again takes a third of the time.
GC_THRESHOLDS = (200_000, 50, 1000)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = argparse.ArgumentParser(
        prog="thermocline simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    asked = known.add_mutually_exclusive_group(required=True)
    asked.add_argument("--trace", type=Path, metavar="FILE", help="trace in the Mooncake format (JSON lines)")
    asked.add_argument("--workload", metavar="NAME", help=f"generator: {', '.join(WORKLOADS)}")
    known.add_argument("--hardware", metavar="NAME", help=f"{', '.join(hardware_names())}, or a .toml file")
    known.add_argument("--model", metavar="NAME", help=f"{', '.join(model_names())}, or a .toml file")
    known.add_argument("--profile", metavar="HARDWARE[/MODEL]", help="both names in one")
    known.add_argument("--policy", metavar="NAME", help="eviction policy")
    known.add_argument("--workers", type=int, default=1, metavar="N")
    known.add_argument("--workers-per-node", type=int, default=8, metavar="N", help="they share host memory")
    known.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices of each worker")
    known.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens of a page")
    known.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of K and V, as workers have it")
    known.add_argument("--device-tokens", type=int, metavar="N", help="KV of each worker; what fits if not given")
    known.add_argument("--host-tokens", type=int, metavar="N", help="host KV of each node; what fits if not given")
    known.add_argument("--disk-tokens", type=int, default=0, metavar="N", help="KV on the disk of each node; none")
    known.add_argument(
        "--network-gb-s",
        type=float,
        default=0.0,
        metavar="X",
        help="GB/s at which nodes read each other's host KV; off",
    )
    known.add_argument("--io", choices=("assisted", "per-page"), default="assisted", help="how pages are copied")
    known.add_argument("--backup-share", type=float, default=1.0, metavar="X", help="of a link's time, for backups")
    known.add_argument("--requests", type=int, metavar="N", help="stop after so many")
    known.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, requests (or sessions) a second")
    known.add_argument(
        "--in-flight",
        type=int,
        metavar="N",
        help="at most so many requests (or sessions) at once; without --rate the next comes when one ends",
    )
    known.add_argument("--speed", type=float, default=1.0, metavar="X", help="divide a trace's times by this")
    known.add_argument("--seed", type=int, default=1, metavar="N")
    known.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="cell setting or workload option",
    )
    known.add_argument("--json", action="store_true", help="print one JSON object")
    return known


def prepare(options: argparse.Namespace) -> Simulation:
    """A simulation that is ready to run. Raises ConfigError naming every fault of the line."""
    _check_numbers(options)
    hardware, model = _profiles(options)
    struct = None
    if options.workload is not None:
        if options.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {options.workload!r}; known are {', '.join(WORKLOADS)}")
        struct = WORKLOADS[options.workload][0]
    config, own = divide(options.settings, struct, policy=options.policy)
    in_flight = options.in_flight
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
    faults = [
        f"--{name} must be at least {least}"
        for name, least in (
            ("workers", 1),
            ("workers-per-node", 1),
            ("tensor-parallel", 1),
            ("page-size", 1),
            ("device-tokens", 1),
            ("host-tokens", 0),
            ("disk-tokens", 0),
            ("requests", 1),
            ("in-flight", 1),
        )
        if (value := getattr(options, name.replace("-", "_"))) is not None and value < least
    ]
    faults += [
        f"--{name} must be above 0"
        for name in ("rate", "speed")
        # A comparison that a NaN fails too.
        if (value := getattr(options, name)) is not None and not 0 < value < float("inf")
    ]
    if not 0 <= options.network_gb_s < float("inf"):
        faults.append("--network-gb-s must be at least 0")
    if not 0 < options.backup_share <= 1:
        faults.append("--backup-share must be above 0, and 1 at the most")
    if faults:
        raise ConfigError("; ".join(faults))


def _profiles(options: argparse.Namespace) -> tuple[str, str]:
    """Names of hardware and model from --hardware and --model, or from --profile."""
    hardware, model = options.hardware, options.model
    if options.profile is not None:
        whole, slash, rest = options.profile.partition("/")
        if options.profile.endswith(".toml"):
            whole, slash, rest = options.profile, "", ""
        hardware = hardware or whole
        model = model or (rest if slash else None)
    missing = [name for name, value in (("--hardware", hardware), ("--model", model)) if not value]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given; hardware: {', '.join(hardware_names())}; "
            f"models: {', '.join(model_names())}"
        )
    return hardware, model


def _workload(options: argparse.Namespace, own: msgspec.Struct | None) -> Workload:
    if options.trace is not None:
        is_timed = options.rate is None and options.in_flight is None
        return TraceWorkload(options.trace, limit=options.requests, is_timed=is_timed, speed=options.speed)
    assert own is not None
    if isinstance(own, ChatOptions) and not own.sessions and options.requests is None:
        raise ConfigError("this workload never ends: give --requests or --set sessions=N")
    return make_workload(options.workload, own, options.seed)


def run(simulation: Simulation) -> dict[str, Any]:
    """Run with a progress line on standard error where that is a terminal; returns the figures."""
    started = time.perf_counter()
    wanted = simulation.setup.requests
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[over]} requests, {task.fields[virtual]} simulated"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, over="0", virtual="0 s")

        def progress(over: int, seconds: float) -> None:
            of = f" of {wanted:,}" if wanted else ""
            bar.update(task, over=f"{over:,}{of}", virtual=f"{seconds:,.0f} s")

        simulation.run(progress)
    figures = simulation.figures()
    if not figures["requests"]:
        raise InvalidRequest("the workload holds no request")
    return figures | {"wall_seconds": time.perf_counter() - started}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a command line, profile or trace that makes no sense."""
    options = parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        simulation = prepare(options)
        figures = run(simulation)
    except (OperatorError, InvalidRequest) as error:
        print(f"thermocline simulate: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    setup = simulation.setup
    described = {
        "workload": options.workload or str(options.trace),
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
    if options.json:
        print(json.dumps(described | figures))
    else:
        title = f"{described['workload']} on {setup.workers} x {setup.hardware.name}, {setup.model.name}"
        show(Console(), figures, f"{title}, {setup.config.policy}, seed {setup.seed}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
