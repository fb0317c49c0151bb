"""``thermocline up``."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
from pathlib import Path

from shared import logs
from shared.config import add_flags, load
from shared.errors import OperatorError
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
    flags = vars(parser.parse_args(arguments))
    file = flags.pop("config")
    if os.environ.get("THERMOCLINE_SUPERVISED"):
        die_with_parent()
    try:
        config = load(SupervisorConfig, "up", file=file, environ=os.environ, flags=flags)
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
