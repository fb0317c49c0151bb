"""Which schedulers fold alike."""

from __future__ import annotations

import platform
from pathlib import Path
from types import ModuleType

import pytest

import shared
from services.scheduler import core, fold_release, policies
from services.scheduler.fold_release import fold_release as release


def test_same_code_folds_alike() -> None:
    """It is a property of the code, not of the process."""
    assert release() == release()
    assert len(release()) == 32


def test_other_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed letter in a source, or a renamed one, is another release."""
    source = tmp_path / "machine.py"
    source.write_text("a = 1\n")
    monkeypatch.setattr(fold_release, "_folder", lambda module_file: tmp_path)
    found = [release()]
    source.write_text("a = 2\n")
    found.append(release())
    source.rename(tmp_path / "machines.py")
    found.append(release())

    assert len(set(found)) == 3


@pytest.mark.parametrize("package", [core, policies, shared])
def test_all_that_decides_counts(package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of the core, of the policies and schedules beside it, and of what both share."""
    here = release()
    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))

    assert release() != here


def test_other_interpreter_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic and order are its business, too."""
    here = release()
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")

    assert release() != here
