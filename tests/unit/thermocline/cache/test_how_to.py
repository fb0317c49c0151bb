"""The page on operating the cache: every command line on it is one that the command understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from thermocline.cache.__main__ import VERBS, parser

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "how-to" / "operate-the-cache.md").read_text(encoding="utf-8")
COMMANDS = [match[1] for match in re.finditer(r"^(?:\$ )?thermocline cache (.+)$", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_understood(command: str) -> None:
    """Flags and values, as the page has them."""
    assert parser().parse_args(shlex.split(command, comments=True)).verb == command.split(maxsplit=1)[0]


def test_it_shows_every_verb() -> None:
    """At least once."""
    assert {command.split()[0] for command in COMMANDS} == {verb.__name__.rpartition(".")[2] for verb in VERBS}
