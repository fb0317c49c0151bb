"""Variables with our prefix: those that something reads are known, and the others are told of once."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from shared import variables
from shared.config import for_service
from shared.renamed_settings import REMOVED, RENAMED
from thermocline.settings import SECTIONS

ROOT = Path(__file__).parents[3]
_NAMED = re.compile(r"\bTHERMOCLINE_([A-Z0-9_]*[A-Z0-9])\b(?!_)")
_SHIPPED = ("services", "shared", "thermocline", "infra", "examples", "docs", "bench")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A service's."""

    limit: int = 1


@pytest.fixture(autouse=True)
def _warns_again() -> None:
    variables.warn_of_strangers.cache_clear()


def test_the_table_has_every_setting_of_every_section() -> None:
    """A service knows only its own; a new setting is added to the table in shared/variables.py."""
    names = {field.name for kind in SECTIONS.values() for field in msgspec.structs.fields(kind)}

    assert set(variables.SETTINGS) == names
    assert sorted(variables.SETTINGS) == list(variables.SETTINGS)


def test_the_table_has_every_variable_that_is_read_or_written_about() -> None:
    """In what is shipped, in containers, in ./task and in the pages."""
    files = [ROOT / "task", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files += [path for folder in _SHIPPED for path in (ROOT / folder).rglob("*") if path.is_file()]
    named: set[str] = set()
    for path in files:
        try:
            named |= set(_NAMED.findall(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue

    unknown = {name for name in named if not variables.is_known(f"THERMOCLINE_{name}")}
    assert unknown <= {name.upper() for name in REMOVED}
    assert {name.lower() for name in named} >= {"nats_password", "tenants", "tag", "torch"}


@pytest.mark.parametrize(
    "variable",
    [
        "THERMOCLINE_PORT_8000_TCP_ADDR",
        "THERMOCLINE_GATEWAY_SERVICE_HOST",
        "THERMOCLINE_GATEWAY_SERVICE_PORT_HTTP",
        "THERMOCLINE_GATEWAY_PORT",
    ],
)
def test_an_orchestrator_s_variables_are_no_settings(variable: str) -> None:
    """Kubernetes makes them for each service, whose name may begin like ours."""
    assert variables.strangers({variable: "tcp://10.0.0.1:8000"}) == []


def test_other_names_are_strangers_with_the_nearest_setting() -> None:
    """By upper case alone; old names are known, and removed ones are told with their history."""
    environ = {
        "THERMOCLINE_SUMARIES": "false",
        "THERMOCLINE_FOO_BAR": "1",
        "THERMOCLINE_SPARSE_REORDER_BYTES_PER_S": "5",
        "thermocline_other": "1",
        "FOO_BAR": "1",
        "THERMOCLINE_CELLS": "a=http://a",
        **{f"THERMOCLINE_{old.upper()}": "1" for old in RENAMED},
    }

    removed, unknown = variables.strangers(environ)

    assert removed.startswith("THERMOCLINE_SPARSE_REORDER_BYTES_PER_S is ignored: it was removed in 0.3.0")
    assert unknown == (
        "these variables are ignored, because no setting has their name: "
        "THERMOCLINE_FOO_BAR, THERMOCLINE_SUMARIES (did you mean THERMOCLINE_SUMMARIES?)"
    )


def test_a_service_warns_once_at_its_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And starts. Under `thermocline up` that has said it for all."""
    monkeypatch.setenv("THERMOCLINE_SUMARIES", "false")
    settings = [for_service(Settings, "router", [], "a test") for _ in range(2)]
    told = capsys.readouterr().err
    variables.warn_of_strangers.cache_clear()
    monkeypatch.setenv("THERMOCLINE_SUPERVISED", "7")
    for_service(Settings, "router", [], "a test")

    assert settings == [Settings(), Settings()]
    assert told.startswith("thermocline router: these variables are ignored")
    assert len(told.splitlines()) == 1
    assert capsys.readouterr().err == ""
