"""``thermocline up``: its flags, the checks before the start, and exit codes."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared import logs
from shared.arguments import ArgumentParser
from shared.config import ENVIRONMENT_PREFIX, add_fields, load, misspelt
from shared.errors import ConfigError, OperatorError
from shared.guard import guarded
from shared.lifecycle import EXIT_REFUSED, die_with_parent
from shared.variables import SUPERVISED, warn_of_strangers
from thermocline.flags import policies_line
from thermocline.supervisor.cell import Cell, resolve
from thermocline.supervisor.commands import service_children
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.folders import folder_faults
from thermocline.supervisor.hidden_form import hidden_form_faults
from thermocline.supervisor.kv_dtype import kv_dtype_faults
from thermocline.supervisor.leftovers import reap_dead_cells
from thermocline.supervisor.page_key import with_page_key
from thermocline.supervisor.preflight import faults_of
from thermocline.supervisor.records import runs_dir

_DESCRIPTION = """Start every process of a cell on this machine, with an embedded NATS, and keep them running.
A settings file given with --config is passed to every process; `up` itself reads section [up]."""

_EPILOG = """These are the settings of `up` itself. Each process that it starts has more: sections [gateway],
[scheduler], [worker] and [storage] of the file, or variables such as THERMOCLINE_DEFER_TOKENS. `thermocline up
--help-all` and `thermocline settings` list them all.

Exit codes: 0 stopped as asked, by Ctrl-C or SIGTERM; 1 failed; 2 refused to start, with the reason; 130 Ctrl-C before
anything was started; 141 broken pipe."""

OPEN_FILES = 65_536

SET_BY_UP = frozenset(
    {
        *("id", "nats_user", "shm_prefix", "gpu", "node_workers", "cpu_kv_bytes", "cpu_dtype"),
        *("grace_ms", "drain_timeout_ms", "stop_timeout_ms", "handover_ms"),
    }
)
"""Settings of processes that `up` gives as flags and has no flags for, so that no file or variable can set them."""

GROUPS = {
    "model and device": (
        "model",
        "max_context_tokens",
        "adapter",
        "device",
        "dtype",
        "kv_dtype",
        "kv_gate",
        "exact",
        "threads",
        "tensor_parallel",
        "profile",
    ),
    "address": ("host", "port", "tls_cert", "tls_key"),
    "processes": ("workers", "schedulers", "ready_timeout_s", "grace_s"),
    "device and host memory": (
        "page_size",
        "device_kv_bytes",
        "device_memory_fraction",
        "host_kv_bytes",
        "prefix_caching",
        "policy",
    ),
    "disk and object store": (
        "disk_dir",
        "disk_kv_bytes",
        "disk_read_bytes_per_s",
        "remote",
        "hidden_form",
        "hidden_bytes",
        "restoring",
    ),
    "prefixes in part": ("importance", "importance_gate", "importance_ratio", "sparse"),
    "load": ("max_batch_tokens", "max_running", "max_queued"),
    "broker": ("nats", "nats_server", "nats_port", "stream_replicas"),
    "files and logs": ("data_dir", "traces", "trace_share", "log_level"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a cell until a signal. Exit codes: 0 stopped as asked, 1 failed, 2 refused to start."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--help-all" in arguments:
        from thermocline.settings import main as list_settings

        return list_settings([])
    parsed, strays = parser().parse_known_args(arguments)
    flags = vars(parsed)
    file = flags.pop("config")
    flags.pop("help_all")
    if starter := os.environ.get(SUPERVISED):
        die_with_parent(int(starter))
    try:
        config = _settings(file, flags, strays)
        # The children log to files; the terminal shows only what an operator should see.
        logs.configure("supervisor", "up", level="info" if config.log_level == "debug" else "warning")
        runs = runs_dir()
        reap_dead_cells(runs)
        config_file = Path(file).resolve() if file else None
        cell = resolve(config, runs, config_file=config_file, more_faults=partial(_more_faults, runs))
        cell = with_page_key(cell, os.environ)
        raise_open_files_limit()
        return _serve(cell, runs)
    except ConfigError as error:
        print(f"thermocline up: {complaint(error)}", file=sys.stderr)
        return EXIT_REFUSED
    except OperatorError as error:
        print(f"thermocline up: {error.message}", file=sys.stderr)
        return EXIT_REFUSED


def parser() -> ArgumentParser:
    """Return the command line: the settings of `up` itself as flags, in groups."""
    made = ArgumentParser(
        prog="thermocline up",
        usage="thermocline up [--config FILE] [--SETTING VALUE ...]",
        description=_DESCRIPTION,
        epilog=f"{policies_line()}\n\n{_EPILOG}",
    )
    made.add_argument("--config", metavar="FILE", help="TOML file with settings of all processes")
    made.add_argument("--help-all", action="store_true", help="list every setting of every process, and exit")
    for title, names in GROUPS.items():
        add_fields(made.add_argument_group(title), SupervisorConfig, names)
    return made


def complaint(error: ConfigError) -> str:
    """Return the message for an operator: one fault as a sentence, several as a list."""
    faults = error.each()
    if len(faults) == 1:
        return faults[0]
    return "\n".join([f"{len(faults)} settings are wrong, and nothing was started:", *(f"  {each}" for each in faults)])


def _more_faults(runs: Path, cell: Cell) -> list[str]:
    faults = [*faults_of(service_children(cell), os.environ), *folder_faults("TMPDIR", runs)]
    faults += hidden_form_faults(cell, os.environ)
    faults += kv_dtype_faults(cell, os.environ)
    if not cell.data_dir_is_temporary:
        faults += folder_faults("--data-dir", cell.data_dir)
    return faults


def _settings(file: str | None, flags: Mapping[str, Any], strays: Sequence[str]) -> SupervisorConfig:
    """Return the settings of `up`. Raises ConfigError with its faults and the misspelt names of all processes."""
    kinds: dict[str, type[msgspec.Struct]] = {
        "up": SupervisorConfig,
        "gateway": GatewayConfig,
        "scheduler": SchedulerConfig,
        "worker": WorkerConfig,
        "storage": StorageConfig,
    }
    warn_of_strangers("thermocline up")
    misplaced, strays = without_misplaced(strays, {section: kinds[section] for section in kinds if section != "up"})
    faults = [*misplaced, *misspelt(kinds, file=file, environ=os.environ)]
    try:
        config = load(SupervisorConfig, "up", file=file, environ=os.environ, flags=flags, strays=strays)
    except ConfigError as error:
        raise ConfigError.of([*error.each(), *faults]) from error
    if faults:
        raise ConfigError.of(faults)
    return config


def without_misplaced(strays: Sequence[str], kinds: Mapping[str, type[msgspec.Struct]]) -> tuple[list[str], list[str]]:
    """Return faults for flags that are settings of processes, which say where those are set, and the other strays."""
    faults: list[str] = []
    others: list[str] = []
    is_value = False
    for argument in strays:
        flag, equals, _ = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        owners = [section for section, kind in kinds.items() if name in kind.__struct_fields__]
        if argument.startswith("--") and owners and name not in SET_BY_UP:
            sections = " or ".join(f"[{section}]" for section in owners)
            faults.append(
                f"{flag} is a setting of {', '.join(owners)}, not of `up`: set {ENVIRONMENT_PREFIX}{name.upper()}, "
                f"or {name} in section {sections} of --config FILE"
            )
            is_value = not equals
        else:
            if argument.startswith("--") or not is_value:
                others.append(argument)
            is_value = False
    return faults, others


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to OPEN_FILES or the hard limit: each client of the gateway takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _serve(cell: Cell, runs: Path) -> int:
    # Imported here so that faulty settings are refused at once.
    from thermocline.supervisor.up import Up

    async def up() -> int:
        return await Up(cell, runs).run()

    return asyncio.run(up())


if __name__ == "__main__":
    sys.exit(guarded(main))
