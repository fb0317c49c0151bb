"""All commands, and their verbs: one vocabulary, help that says every choice and no empty default, 80 columns."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from services.scheduler.core.cache.eviction import POLICIES
from shared.arguments import ArgumentParser
from thermocline.commands import COMMANDS

OLD_NAMES = {"--base-url", "--max-in-flight", "--in-flight", "--scale", "--speed"}
"""Of release 0.2: help and completion do not show them."""


def _lines() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for command in COMMANDS:
        yield from _with_verbs(command.name, command.parser())


def _with_verbs(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, own in action.choices.items():
                yield from _with_verbs(f"{name} {verb}", own)


LINES = dict(_lines())
PROCESSES = ("up", "gateway", "router", "scheduler", "worker", "storage")
"""They tell of an unknown flag together with every other fault of their settings."""

REQUIRED = {
    "broker-config": "--out-dir x",
    "record": "--out x",
    "replay": "x",
    "skip-input": "1",
    "trace send": "x",
    "trace import": "x --format openai-log --out y",
    "cache pin": "--prompt x",
    "cache unpin": "x",
    "cache prewarm": "x",
    "keys new": "--file f a",
    "keys add": "--file f a",
    "keys revoke": "--file f a b",
    "keys ls": "--file f",
}
"""What a line needs so that nothing else is wrong with it."""

UNFINISHED = ("completion", "cache", "keys", "trace")
"""They lack a verb or a choice, and say that first."""

each = pytest.mark.parametrize("name", LINES)


def _help(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return LINES[name].format_help()


def _flags(name: str) -> dict[str, argparse.Action]:
    return {flag: action for action in LINES[name]._actions for flag in action.option_strings if flag.startswith("--")}


@each
def test_help_fits_80_columns_and_names_no_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it show what a flag is called in the code."""
    text = _help(name, monkeypatch)

    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.findall(r"default:? None|\bNone\b|==SUPPRESS==|PosixPath|<function", text) == []
    assert text.startswith(f"usage: thermocline {name}")


@each
def test_every_flag_says_what_it_does(name: str) -> None:
    """Positional arguments, too."""
    silent = [action.dest for action in LINES[name]._actions if not action.help]

    assert silent in ([], ["verb"])


@each
def test_every_choice_is_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the type of a setting lists words, they are in its help."""
    text = _help(name, monkeypatch)

    for action in LINES[name]._actions:
        for choice in action.choices or ():
            assert re.search(rf"\b{re.escape(str(choice))}\b", text), (action.dest, choice)


@each
def test_old_names_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are parsed, and shown nowhere."""
    text = _help(name, monkeypatch)

    assert [flag for flag in OLD_NAMES if re.search(rf"{flag}\b(?!-)", text)] == []
    assert all(action.help == argparse.SUPPRESS for flag, action in _flags(name).items() if flag in OLD_NAMES)


@each
def test_one_name_means_one_thing(name: str) -> None:
    """``--json`` is a switch, ``--out`` a file, ``--url`` an address, ``--concurrency`` a count."""
    flags = {flag: action for flag, action in _flags(name).items() if action.help != argparse.SUPPRESS}
    metavars = {"--out": "FILE", "--out-dir": "DIR", "--url": "URL", "--concurrency": "N", "--time-scale": "X"}

    assert flags.get("--json") is None or flags["--json"].nargs == 0
    assert {flag: flags[flag].metavar for flag in metavars if flag in flags} == {
        flag: metavar for flag, metavar in metavars.items() if flag in flags
    }


@each
def test_every_command_line_is_ours(name: str) -> None:
    """So abbreviations are refused, and a fault is one line."""
    assert isinstance(LINES[name], ArgumentParser)
    assert LINES[name].allow_abbrev is False


def test_the_vocabulary_is_in_use() -> None:
    """So the tests above look at something."""
    named = {flag for name in LINES for flag in _flags(name)}

    assert {"--url", "--concurrency", "--time-scale", "--json", "--out", *OLD_NAMES} <= named
    assert len(LINES) > 25


@pytest.mark.parametrize("name", [name for name in LINES if name not in (*PROCESSES, *UNFINISHED)])
def test_an_unknown_flag_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command's name, and exit code 2."""
    command, *verb = name.split()
    with pytest.raises(SystemExit) as ended:
        LINES[command].parse_args([*verb, *REQUIRED.get(name, "").split(), "--jsom"])

    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert error.startswith(f"thermocline {command}")
    assert "--jsom is not a flag" in error


@pytest.mark.parametrize("name", ["up", "simulate", "replay"])
def test_eviction_policies_are_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one that is registered."""
    listed = re.search(r"Eviction policies: ([^.]+)\.", " ".join(_help(name, monkeypatch).split()))

    assert listed is not None
    assert listed[1].split(", ") == sorted(POLICIES)
