"""The audit of dependencies: that it finds what it is for, and that this project has no fault."""

from __future__ import annotations

import tomllib
from importlib import metadata
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools import dependency_audit
from tools.dependency_audit import Bad


def test_this_project_has_no_fault() -> None:
    """Bounds, versions, licences, and nothing that is known to be bad."""
    assert dependency_audit.audit() == []


def test_an_open_range_is_a_fault() -> None:
    """A lower bound alone, or none, lets a release of somebody else change what we are."""
    requirements = [Requirement(text) for text in ("one>=1", "two", "three<4", "four>=1,<2", "five==1.*", "six~=1.2")]

    faults = list(dependency_audit.unbounded(requirements))

    assert [fault.split()[0] for fault in faults] == ["one", "two", "three"]


def test_what_is_installed_must_be_what_is_asked_for() -> None:
    """Another version, or none; but not what another platform needs."""
    requirements = [Requirement(text) for text in ("one>=1,<2", "two>=1,<2", "gone>=1,<2", "far>=1; os_name == 'none'")]

    faults = list(dependency_audit.misfits(requirements, {"one": "1.5", "two": "2.0"}))

    assert faults == ["two 2.0 is installed, but <2,>=1 is asked for", "gone is not installed"]


def test_a_version_that_is_known_to_be_bad_is_a_fault() -> None:
    """By package and range, with the advisory."""
    bad = [Bad("one", SpecifierSet("<1.2"), "CVE-1"), Bad("absent", SpecifierSet("<9"), "CVE-2")]

    assert list(dependency_audit.bad_versions({"one": "1.1"}, bad)) == ["one 1.1 is known to be bad: CVE-1"]
    assert list(dependency_audit.bad_versions({"one": "1.2"}, bad)) == []


@pytest.mark.parametrize(
    ("told", "is_fault"),
    [
        ("MIT", False),
        ("Apache Software License", False),
        ("MPL-2.0 AND MIT", False),
        ("GPL-3.0-only", True),
        ("LGPL-2.1 AND MIT", True),
        ("Some Company Limited", True),
        ("Free for non-commercial use, BSD", True),
        ("", True),
    ],
)
def test_a_licence_that_is_not_plainly_permissive_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, told: str, is_fault: bool
) -> None:
    """Unless somebody has looked at it."""
    monkeypatch.setattr(dependency_audit, "licence", lambda name: told)

    assert bool(list(dependency_audit.unlicensed({"one"}, {}))) is is_fault
    assert list(dependency_audit.unlicensed({"one-cu13"}, {"one-*": "looked at"})) == []


def test_what_dependencies_need_is_looked_at_too() -> None:
    """FastAPI brings Starlette, which is named nowhere here."""
    found = dependency_audit.closure([Requirement("fastapi")])

    assert "starlette" in found["fastapi"]
    assert set.union(*found.values()) <= found.keys()


def test_what_an_extra_needs_belongs_to_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's CUDA build needs NVIDIA's libraries by extras of cuda-toolkit."""
    needs = {
        "torch": ['cuda-toolkit[nvrtc]==13.0; platform_system == "Linux"', "sympy"],
        "cuda-toolkit": ['nvidia-nvrtc==13.0; extra == "nvrtc"', 'nvidia-fft==12; extra == "fft"'],
        "nvidia-nvrtc": [],
        "sympy": [],
    }
    monkeypatch.setattr(metadata, "requires", needs.__getitem__)

    assert dependency_audit.closure([Requirement("torch")]) == {
        "torch": {"cuda-toolkit", "sympy"},
        "cuda-toolkit": {"nvidia-nvrtc"},
        "nvidia-nvrtc": set(),
        "sympy": set(),
    }


def test_every_entry_of_the_list_is_whole() -> None:
    """A package, a range that some version is in, and an advisory by its number."""
    entries: list[dict[str, Any]] = tomllib.loads(dependency_audit.KNOWN_BAD.read_text())["bad"]

    assert len(entries) == len(dependency_audit.known_bad())
    assert all(SpecifierSet(entry["versions"]).contains("0.0.1") for entry in entries)
    assert all("CVE-" in entry["advisory"] or "GHSA-" in entry["advisory"] for entry in entries)
