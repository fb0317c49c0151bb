"""``thermocline COMMAND``: finds the command's ``main`` and hands it the rest of the line.

Modules are imported only when their command runs, so that ``thermocline --help`` is quick and a command that
needs no PyTorch never waits for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.guard import guarded

EXIT_USAGE = 2

# These look at the installation only, so that they can be asked anywhere.
_ANY_SYSTEM = ("version", "doctor")


@dataclass(frozen=True, slots=True)
class Command:
    """``target`` is ``module:function``; the function takes argv and returns an exit code."""

    name: str
    target: str
    summary: str
    asks_broker: bool = False  # It finds the cell that runs on this machine where it is not told of a broker,
    asks_none: tuple[str, ...] = ()  # but for these verbs.

    @property
    def exists(self) -> bool:
        """Whether the module can be found; only its parent packages are imported to tell."""
        try:
            return importlib.util.find_spec(self.target.partition(":")[0]) is not None
        except ModuleNotFoundError:
            return False

    def load(self) -> Callable[[list[str]], int]:
        module, _, function = self.target.partition(":")
        main: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
        return main


COMMANDS = (
    Command("up", "thermocline.supervisor.__main__:main", "every process on this machine, with an embedded NATS"),
    Command("gateway", "services.gateway.__main__:main", "one gateway: the OpenAI-compatible HTTP API"),
    Command("router", "services.gateway.router.__main__:main", "one router: HTTP in front of several cells"),
    Command("scheduler", "services.scheduler.__main__:main", "one scheduler: batches, placement and every page table"),
    Command("worker", "services.worker.__main__:main", "one worker: runs the model"),
    Command("storage", "services.storage.__main__:main", "this node's storage: the lower tiers"),
    Command("demo", "thermocline.demo.__main__:main", "serve the bundled model and show the prefix cache at work"),
    Command(
        "cache",
        "thermocline.cache.__main__:main",
        "look at the prefix cache of a running cell, and empty it",
        asks_broker=True,
        asks_none=("prewarm",),
    ),
    Command("keys", "thermocline.keys.__main__:main", "tenants and their API keys: make, add, revoke, list"),
    Command("top", "thermocline.top.__main__:main", "watch a running cell in a terminal"),
    Command(
        "record",
        "services.scheduler.record:main",
        "export the input stream of a running cell to a file",
        asks_broker=True,
    ),
    Command(
        "skip-input",
        "services.scheduler.skip_input:main",
        "have every scheduler leave out an input at which it hangs or dies",
        asks_broker=True,
    ),
    Command("replay", "thermocline.replay.__main__:main", "fold a recording again, or ask what if"),
    Command("trace", "thermocline.trace.__main__:main", "drive a running system with a production trace"),
    Command("simulate", "thermocline.simulate.__main__:main", "the scheduler under virtual time, on modelled hardware"),
    Command("bench", "thermocline.bench.__main__:main", "measure any OpenAI-compatible server, and compare results"),
    Command("eval", "thermocline.evaluation.__main__:main", "measure what loading a part of a prefix costs in quality"),
    Command("chaos", "thermocline.chaos.__main__:main", "inject faults into a cell under load, and check every answer"),
    Command("broker-config", "thermocline.broker.__main__:main", "users with permissions for a NATS server"),
    Command("doctor", "thermocline.doctor.__main__:main", "check that this machine has what Thermocline needs"),
    Command("settings", "thermocline.settings:main", "list every setting of every process, with its default"),
    Command("version", "thermocline.version:main", "print the version, and with --json those of the formats"),
)


def commands() -> dict[str, Command]:
    """The commands that this installation has, by name."""
    return {command.name: command for command in COMMANDS if command.exists}


def usage(known: Sequence[Command]) -> str:
    """The text of ``--help``: one line per command."""
    width = max(len(command.name) for command in known)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in known]
    return "\n".join(
        [
            "usage: thermocline COMMAND [flags]",
            "",
            "LLM serving whose prefix KV cache lives in tiers.",
            "",
            "commands:",
            *lines,
            "",
            "`thermocline COMMAND --help` lists a command's flags. Start with: thermocline up",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command, that of the process's own command line where ``argv`` is None.

    Exit code 2 is a command line that makes no sense, 130 Ctrl-C, 141 output that nothing reads any more.
    """
    if argv is None:
        return guarded(lambda: run_command(sys.argv[1:]))
    return run_command(list(argv))


def run_command(arguments: Sequence[str]) -> int:
    """Find the command and run it."""
    known = commands()
    if not arguments:
        print(usage(list(known.values())), file=sys.stderr)
        return EXIT_USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(usage(list(known.values())))
        return 0
    if name in ("-V", "--version"):
        name = "version"
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean `thermocline {close[0]}`?" if close else ""
        print(f"thermocline: there is no command {name!r}{hint}", file=sys.stderr)
        print(f"commands: {', '.join(known)}", file=sys.stderr)
        return EXIT_USAGE
    if not sys.platform.startswith("linux") and name not in _ANY_SYSTEM:
        print(f"thermocline {name}: Thermocline runs on Linux only, because its pools lie in /dev/shm", file=sys.stderr)
        return EXIT_USAGE
    command = known[name]
    if command.asks_broker and not (rest and rest[0] in command.asks_none):
        local_cell = importlib.import_module("thermocline.supervisor.local_cell")
        try:
            rest = [*rest, *local_cell.broker_flags(rest, os.environ)]
        except local_cell.SeveralCells as error:
            print(f"thermocline {name}: {error}", file=sys.stderr)
            return EXIT_USAGE
    return command.load()(rest)


if __name__ == "__main__":
    sys.exit(main())
