"""``thermocline settings``: every setting of every process, with its default and how to set it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.router.config import RouterConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared.arguments import ArgumentParser
from shared.config import ENVIRONMENT_PREFIX, help_of
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
up` hands the file to every process that it starts, and each variable to those that read it. Sizes may be written
64MiB."""

_WIDTH = 80
_INDENT = "      "


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline settings", description="Print every setting of every process, with its default."
    )
    made.add_argument("section", nargs="?", choices=tuple(SECTIONS), help="only the settings of this process")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the settings; return exit code 0."""
    options = parser().parse_args(argv)
    print(text([options.section] if options.section else list(SECTIONS)))
    return 0


def text(sections: list[str]) -> str:
    """Return the listing of these sections, wrapped at 80 columns."""
    lines = textwrap.wrap(_HEAD, _WIDTH)
    for section in sections:
        lines += ["", f"[{section}]", *_settings_of(SECTIONS[section])]
    return "\n".join(lines)


def _settings_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        yield f"  --{field.name.replace('_', '-')}{'  (required)' if field.required else ''}"
        yield textwrap.fill(
            help_of(field), _WIDTH, break_on_hyphens=False, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
