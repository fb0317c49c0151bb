"""The bill of materials: valid, whole, and the same twice."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from typing import Any

import pytest
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import dependency_audit, sbom

TIME_S = 1_700_000_000


@pytest.fixture(scope="module")
def text() -> str:
    return sbom.to_json(sbom.make(epoch_s=TIME_S))


@pytest.fixture(scope="module")
def bill(text: str) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(text)
    return decoded


def test_it_is_valid(text: str) -> None:
    """By the schema of CycloneDX, which comes with the library."""
    assert JsonStrictValidator(sbom.SCHEMA).validate_str(text) is None


def test_it_is_the_same_twice(text: str) -> None:
    """The same installation and time give the same bytes; another time does not."""
    assert sbom.to_json(sbom.make(epoch_s=TIME_S)) == text
    assert sbom.to_json(sbom.make(epoch_s=TIME_S + 1)) != text


def test_it_holds_what_is_needed_as_installed(bill: dict[str, Any]) -> None:
    """Every dependency that this platform needs, in the version that is installed, and no tool of development."""
    project = tomllib.loads((dependency_audit.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(each) for each in project["dependencies"]]
    wanted = {canonicalize_name(each.name) for each in requirements if each.marker is None or each.marker.evaluate()}

    held = {each["name"]: each["version"] for each in bill["components"]}

    assert wanted <= held.keys()
    assert held == {name: metadata.version(name) for name in held}
    assert not {"pytest", "mypy", "ruff", "thermocline"} & held.keys()
    assert bill["metadata"]["component"]["version"] == project["version"]


def test_it_says_who_needs_whom(bill: dict[str, Any]) -> None:
    """A dependency of a dependency is told as such, and everything is reached from ourselves."""
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    refs = {each["name"]: each["bom-ref"] for each in bill["components"]}
    reached: set[str] = set()
    waiting = [bill["metadata"]["component"]["bom-ref"]]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += needs[ref]

    assert refs["starlette"] in needs[refs["fastapi"]]
    assert reached >= set(refs.values())


def test_a_package_that_declares_no_licence_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's cuda-toolkit is one; the bill stays valid whatever build of PyTorch is installed."""
    monkeypatch.setattr(sbom, "licence", lambda name: "" if name == "numpy" else "MIT")

    made = sbom.to_json(sbom.make(epoch_s=TIME_S))

    assert JsonStrictValidator(sbom.SCHEMA).validate_str(made) is None
    (numpy,) = [each for each in json.loads(made)["components"] if each["name"] == "numpy"]
    assert numpy["licenses"] == [{"license": {"name": "not declared by the package"}}]


def test_the_table_has_a_row_for_each(bill: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Name, version and licence."""
    assert sbom.main(["--table"]) == 0

    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[each["name"], each["version"]] for each in bill["components"]]
