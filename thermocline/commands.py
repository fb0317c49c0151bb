"""Every command of ``thermocline``, in groups, and the module of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.arguments import ArgumentParser


@dataclass(frozen=True, slots=True)
class Command:
    """One command; its ``module`` has functions ``main``, from argv to an exit code, and ``parser``."""

    name: str
    module: str
    summary: str
    old_name: str = ""  # Its name in an earlier release, which still works.
    is_process: bool = False  # It sets up logging of its own.
    asks_broker: bool = False  # Without a broker's address it finds the cell of this machine,
    asks_none: tuple[str, ...] = ()  # except for these verbs.

    def load(self) -> Callable[[list[str]], int]:
        """Import the module and return its ``main``."""
        main: Callable[[list[str]], int] = importlib.import_module(self.module).main
        return main

    def parser(self) -> ArgumentParser:
        """Import the module and return its command line."""
        made: ArgumentParser = importlib.import_module(self.module).parser()
        return made


GROUPS: Mapping[str, tuple[Command, ...]] = {
    "serve": (
        Command("up", "thermocline.supervisor.__main__", "start every process on this machine", is_process=True),
        Command("gateway", "services.gateway.__main__", "one gateway: the OpenAI-compatible HTTP API", is_process=True),
        Command("router", "services.gateway.router.__main__", "one router: HTTP for several cells", is_process=True),
        Command("scheduler", "services.scheduler.__main__", "one scheduler: batches and page tables", is_process=True),
        Command("worker", "services.worker.__main__", "one worker: runs the model", is_process=True),
        Command("storage", "services.storage.__main__", "this node's storage: the lower tiers", is_process=True),
    ),
    "watch and operate": (
        Command("top", "thermocline.top.__main__", "watch a running cell in a terminal"),
        Command(
            "cache",
            "thermocline.cache.__main__",
            "list, measure, pin, prewarm and flush the prefix cache",
            asks_broker=True,
            asks_none=("prewarm",),
        ),
        Command(
            "kv-events",
            "services.scheduler.kv_events.__main__",
            "tell outer routers what is cached, over ZeroMQ",
            asks_broker=True,
        ),
        Command("keys", "thermocline.keys.__main__", "make, add, revoke and list API keys of tenants"),
        Command("broker-config", "thermocline.broker.__main__", "write users and permissions for a NATS server"),
        Command(
            "skip-input",
            "services.scheduler.skip_input",
            "leave out an input at which schedulers hang or die",
            asks_broker=True,
        ),
    ),
    "measure": (
        Command("demo", "thermocline.demo.__main__", "serve the bundled model and show the prefix cache at work"),
        Command(
            "load",
            "thermocline.load.__main__",
            "send load to any OpenAI-compatible server and measure it",
            old_name="bench",
        ),
        Command("trace", "thermocline.trace.__main__", "send a trace to a running cell, or import a log as one"),
        Command("eval", "thermocline.evaluation.__main__", "measure what loading a part of a prefix costs in quality"),
        Command("chaos", "thermocline.chaos.__main__", "inject faults under load, check answers", is_process=True),
    ),
    "simulate and replay": (
        Command("simulate", "thermocline.simulate.__main__", "run the scheduler in virtual time on modelled hardware"),
        Command("record", "services.scheduler.record", "export a running cell's inputs to a file", asks_broker=True),
        Command("replay", "thermocline.replay.__main__", "fold a recording again, or ask what if"),
    ),
    "this installation": (
        Command("doctor", "thermocline.doctor.__main__", "check that this machine has what Thermocline needs"),
        Command("settings", "thermocline.settings", "list every setting of every process, with its default"),
        Command("completion", "thermocline.completion", "print completion for bash, zsh or fish"),
        Command("version", "thermocline.version", "print the version, and with --json those of the formats"),
    ),
}

COMMANDS = tuple(command for group in GROUPS.values() for command in group)


def commands() -> dict[str, Command]:
    """Return all commands by name."""
    return {command.name: command for command in COMMANDS}


def usage() -> str:
    """Return the text of ``--help``: one line per command, in groups."""
    width = max(map(len, commands()))
    lines = ["usage: thermocline COMMAND [flags]", "", "LLM serving whose prefix KV cache lives in tiers."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {command.name:<{width}}  {command.summary}" for command in group]
    return "\n".join([*lines, "", "`thermocline COMMAND --help` lists a command's flags. Start with: thermocline up"])
