"""``thermocline settings``: every setting of every process, with its default and where it is given."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.router.config import RouterConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared.config import ENVIRONMENT_PREFIX, choices_of, description_of
from thermocline.supervisor.config import SupervisorConfig

SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "up": SupervisorConfig,
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "storage": StorageConfig,
}

_HEAD = f"""A setting of process P is a flag of `thermocline P`, a variable {ENVIRONMENT_PREFIX}<NAME>, or a line of
section [P] in the TOML file that --config names. Flags win over variables, and variables over the file. `thermocline
up` hands file and variables to every process that it starts. Sizes may be written 64MiB."""

_WIDTH = 110
_INDENT = "      "
_UNITS = ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)


def main(argv: list[str] | None = None) -> int:
    """Print them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="thermocline settings", description="Print every setting of every process, with its default."
    )
    parser.add_argument("section", nargs="?", choices=tuple(SECTIONS), help="only those of this process")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    print(text([options.section] if options.section else list(SECTIONS)))
    return 0


def text(sections: list[str]) -> str:
    """The listing of these sections."""
    lines = [_HEAD]
    for section in sections:
        lines += ["", f"[{section}]", *_settings_of(SECTIONS[section])]
    return "\n".join(lines)


def _settings_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        yield f"  --{field.name.replace('_', '-')}  ({_default(field)})"
        choices = choices_of(field.type)
        told = [description_of(field.type), f"one of {', '.join(choices)}" if choices else ""]
        yield textwrap.fill("; ".join(filter(None, told)), _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _default(field: Any) -> str:
    """``default 64 MiB``; what ``up`` leaves to the process that it starts, or to the machine, is not set."""
    if field.required:
        return "required"
    value = field.default
    if value is None:
        return "not set"
    if value in ("", ()):
        return "default none"
    if isinstance(value, bool):
        return f"default {'true' if value else 'false'}"
    if isinstance(value, tuple):
        return f"default {','.join(value)}"
    if field.name.endswith(("_bytes", "_bytes_per_s")):
        return f"default {_size(value)}"
    return f"default {value}"


def _size(nbytes: int) -> str:
    for unit, scale in _UNITS:
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} bytes"
