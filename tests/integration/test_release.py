"""A release as somebody gets it: built from this checkout, installed without an index, run from outside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import release_check, wheel_trial

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (release_check.ROOT / ".git").exists(), reason="releases are made from a git checkout"),
]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """sdist and wheel."""
    folder = tmp_path_factory.mktemp("release")
    release_check.copy_source(folder / "source")
    (folder / "out").mkdir()
    return release_check.build(folder / "source", folder / "out", epoch_s=1_700_000_000)


@pytest.fixture(scope="module")
def python(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel alone."""
    return wheel_trial.install(archives[1], tmp_path_factory.mktemp("installed") / "environment")


def test_the_archives_hold_what_they_should(archives: tuple[Path, Path]) -> None:
    """Code and data of every kind, the model and the licence; no tests in the wheel."""
    assert list(release_check.contents_faults(*archives)) == []


def test_every_module_of_the_wheel_imports_without_the_checkout(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """From a folder that holds the wheel alone, beside what it depends on."""
    assert wheel_trial.import_faults(archives[1], tmp_path / "unpacked") == []


def test_the_commands_run_from_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    """Version, help and doctor, with the code and the model of the wheel."""
    wheel_trial.run_commands(python, tmp_path)


def test_the_installed_cell_answers_and_stops(python: Path, tmp_path: Path) -> None:
    """``thermocline up`` without a model serves the one of the wheel, and ends cleanly."""
    assert wheel_trial.serve(python, tmp_path)
