"""The table of versions says what the writers of each format write."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler import core, recording, snapshots
from services.storage import chunk_format
from shared import versions
from thermocline.__main__ import main

ROOT = Path(__file__).parents[3]
# An image's tag, Compose's default of it, a build argument, and what the chart calls the application.
_NAMED = re.compile(r"(?:thermocline-\w+:|TAG:-|TAG=|VERSION=|appVersion: )(\d+\.\d+[\w.]*\w)")
_NAMING = ("infra/**/*", "docs/**/*.md", "README.md")


def in_pyproject() -> str:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def test_the_table_is_what_is_written() -> None:
    """Formats that carry their version carry the major one of the table."""
    written = {
        versions.CHUNK: chunk_format.SEALED_VERSION,
        versions.SPARSE: chunk_format.SEALED_VERSION,
        versions.RECORDING: recording.VERSION,
        versions.SNAPSHOT: snapshots.VERSION,
        versions.STATE: msgspec.msgpack.decode(core.encode_state(core.new_state()))["version"],
    }

    assert {each.name: each.major for each in written} == {each.name: number for each, number in written.items()}


def test_names_are_unique() -> None:
    """Each format is in the table once."""
    names = [each.name for each in versions.FORMATS]

    assert len(names) == len(set(names))


def test_the_command_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """``thermocline version --json`` has the release and each format."""
    assert main(["version", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["thermocline"] == versions.release()
    assert shown["formats"] == {each.name: f"{each.major}.{each.minor}" for each in versions.FORMATS}


def test_the_installed_release_is_that_of_the_checkout() -> None:
    """``./task`` installs again after the version changed; without it: pip install --no-deps -e ."""
    assert versions.release() == in_pyproject()


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The example in docs/reference/compatibility.md is today's."""
    page = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
    shown = json.loads(page.split("```")[1])

    main(["version", "--json"])

    assert shown == json.loads(capsys.readouterr().out)


def test_images_and_chart_are_of_this_release() -> None:
    """Every tag, build argument and label names one version: the one in ``pyproject.toml``."""
    texts = {path: path.read_text(encoding="utf-8") for glob in _NAMING for path in ROOT.glob(glob) if path.is_file()}

    named = {path: set(_NAMED.findall(text)) for path, text in texts.items()}

    assert {path for path, found in named.items() if found - {in_pyproject()}} == set()
    assert sum(map(bool, named.values())) >= 6


def test_the_chart_counts_with_the_release() -> None:
    """Its own version is the release's, written as Helm wants it."""
    chart = (ROOT / "infra/chart/thermocline/Chart.yaml").read_text(encoding="utf-8")

    assert f"\nversion: {in_pyproject().replace('.dev', '-dev.')}\n" in chart
