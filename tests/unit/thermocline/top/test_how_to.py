"""The page about watching a cell says what the command takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thermocline.top.__main__ import parser
from thermocline.top.frames import VIEWS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "watch.md"


def test_flags_and_views_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of the command is on the page, and every view is named there."""
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = PAGE.read_text()

    assert {flag for flag in flags if flag not in page} == set()
    assert {view for view in VIEWS if view not in page} == set()
