"""Finds a command's ``main`` and hands it the rest of the line.

Modules are imported only when their command runs, so that ``thermocline --help`` is quick and a command that
needs no PyTorch never waits for it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from shared.arguments import say_renamed
from shared.errors import ConfigError
from shared.spelling import nearest
from thermocline.commands import Command, commands, usage

EXIT_USAGE = 2

# These look at the installation only, so they run on any system.
_ANY_SYSTEM = ("version", "doctor", "completion")


def run_command(arguments: Sequence[str], *, is_own_process: bool = False) -> int:
    """Find the command and run it; return its exit code. In a process of its own it logs only errors."""
    if not arguments:
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    known = commands()
    command = known.get("version" if name in ("-V", "--version") else name) or _by_old_name(known, name)
    if command is None:
        print(f"thermocline: there is no command {name!r}{_hint(name, known)}", file=sys.stderr)
        return EXIT_USAGE
    if not sys.platform.startswith("linux") and command.name not in _ANY_SYSTEM:
        print(f"thermocline {name}: Thermocline runs on Linux only, because its pools lie in /dev/shm", file=sys.stderr)
        return EXIT_USAGE
    if command.asks_broker and not (rest and rest[0] in command.asks_none):
        local_cell = importlib.import_module("thermocline.supervisor.local_cell")
        try:
            rest = [*rest, *local_cell.broker_flags(rest, os.environ)]
        except (local_cell.SeveralCells, ConfigError) as error:
            # A usage error ends the command here, and with a gateway's address no broker is asked.
            if getattr(command.parser().parse_args(rest), "url", None) is None:
                print(f"thermocline {name}: {error}", file=sys.stderr)
                return EXIT_USAGE
    run = command.load()
    if is_own_process and not command.is_process:
        importlib.import_module("shared.logs").quiet()
    return run(rest)


def _by_old_name(known: Mapping[str, Command], name: str) -> Command | None:
    command = next((command for command in known.values() if name and command.old_name == name), None)
    if command is not None:
        say_renamed("thermocline", name, command.name)
    return command


def _hint(name: str, known: Mapping[str, Command]) -> str:
    return nearest(name, known, "thermocline ", cutoff=0.6) or "; `thermocline --help` lists them"
