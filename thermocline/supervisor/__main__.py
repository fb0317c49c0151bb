"""``thermocline up``."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.storage.key_ring import DEFAULT_KEY_VARIABLE
from services.worker.config import WorkerConfig
from shared import logs
from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE
from shared.config import add_flags, load, misspelt
from shared.errors import ConfigError, OperatorError
from shared.lifecycle import EXIT_REFUSED, die_with_parent
from thermocline.supervisor.cell import Cell, resolve
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.leftovers import reap_dead_cells
from thermocline.supervisor.records import runs_dir
from thermocline.supervisor.up import Up

_DESCRIPTION = """Start every process of a cell on this machine, with an embedded NATS, and keep them running.
A settings file given with --config is handed to every process: section [up] is read here."""


def main(argv: list[str] | None = None) -> int:
    """Run until a signal. Exit codes: 0 stopped as asked, 1 failed, 2 refused to start."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="thermocline up", description=_DESCRIPTION, allow_abbrev=False)
    add_flags(parser, SupervisorConfig)
    parsed, strays = parser.parse_known_args(arguments)
    flags = vars(parsed)
    file = flags.pop("config")
    if os.environ.get("THERMOCLINE_SUPERVISED"):
        die_with_parent()
    try:
        config = _settings(file, flags, strays)
        # What the children log is in their files; here only what an operator should see is shown.
        logs.configure("supervisor", "up", level="info" if config.log_level == "debug" else "warning")
        runs = runs_dir()
        reap_dead_cells(runs)
        cell = resolve(config, runs, config_file=Path(file).resolve() if file else None)
        raise_open_files_limit()
        return asyncio.run(_up(cell, runs))
    except OperatorError as error:
        print(f"thermocline up: {error.message}", file=sys.stderr)
        return EXIT_REFUSED


def _settings(file: str | None, flags: Mapping[str, Any], strays: Sequence[str]) -> SupervisorConfig:
    """Raises ConfigError with every fault here and every misspelt name of any process, before one is started."""
    kinds: dict[str, type[msgspec.Struct]] = {
        "up": SupervisorConfig,
        "gateway": GatewayConfig,
        "scheduler": SchedulerConfig,
        "worker": WorkerConfig,
        "storage": StorageConfig,
    }
    allowed = (PASSWORD_VARIABLE, TOKEN_VARIABLE, DEFAULT_KEY_VARIABLE)
    faults = misspelt(kinds, file=file, environ=os.environ, allowed=allowed)
    try:
        config = load(SupervisorConfig, "up", file=file, environ=os.environ, flags=flags, strays=strays)
    except ConfigError as error:
        raise ConfigError(
            "; ".join([error.message, *(fault for fault in faults if fault not in error.message)])
        ) from error
    if faults:
        raise ConfigError("; ".join(faults))
    return config


def raise_open_files_limit(wanted: int = 65_536) -> None:
    """Let the children open as many files as the hard limit allows: each client of the gateway takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def _up(cell: Cell, runs: Path) -> int:
    return await Up(cell, runs).run()


if __name__ == "__main__":
    sys.exit(main())
