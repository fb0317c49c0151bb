"""``thermocline completion SHELL``: a script for a shell, made by shtab.

The script holds every flag and choice, so that completing a word starts no Python.
"""

from __future__ import annotations

import argparse

import msgspec
import shtab

from shared.arguments import ArgumentParser
from shared.config import choices_of
from thermocline.commands import commands
from thermocline.settings import SECTIONS

SHELLS = ("bash", "zsh", "fish")

_EPILOG = """bash: thermocline completion bash > ~/.local/share/bash-completion/completions/thermocline

zsh: thermocline completion zsh > ~/.zfunc/_thermocline, with ~/.zfunc in fpath before compinit

fish: thermocline completion fish > ~/.config/fish/completions/thermocline.fish"""


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline completion",
        description="Print a script that completes commands, flags, choices and files in a shell.",
        epilog=_EPILOG,
    )
    made.add_argument("shell", choices=SHELLS, help="shell that reads the script")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the script; return exit code 0."""
    shell = parser().parse_args(argv).shell
    print(shtab.complete(whole_line(), shell))
    return 0


def whole_line() -> ArgumentParser:
    """Return a parser with every command as a subcommand, for shtab."""
    made = ArgumentParser(prog="thermocline")
    verbs = made.add_subparsers(metavar="COMMAND")
    for command in commands().values():
        own = command.parser()
        _complete_paths(own)
        _complete_settings(own, command.name)
        verbs.add_parser(command.name, help=command.summary, parents=[own], add_help=False)
    return made


def _complete_settings(parser: argparse.ArgumentParser, section: str) -> None:
    """Complete settings that are one of a few words; parsing leaves their check to the setting's type."""
    kind = SECTIONS.get(section)
    words = {field.name: choices_of(field.type) for field in msgspec.structs.fields(kind)} if kind else {}
    for action in parser._actions:
        if words.get(action.dest):
            action.choices = words[action.dest]


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Complete files and folders: values whose metavar is FILE or DIR."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_paths(verb)
        elif action.metavar in ("FILE", "FILE,…"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in ("DIR", "DIR,…"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
