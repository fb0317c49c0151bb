"""The trial of a wheel finds what a machine without the checkout would meet."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tools import wheel_trial
from tools.wheel_trial import ReleaseFault


def wheel_of(folder: Path, **files: str) -> Path:
    """A wheel with these modules of the package ``thing``."""
    path = folder / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("thing/__init__.py", "")
        zipped.writestr("thing-1.dist-info/METADATA", "")
        for name, text in files.items():
            zipped.writestr(f"thing/{name}.py", text)
    return path


def test_a_wheel_that_is_whole_has_no_fault(tmp_path: Path) -> None:
    """Its modules may import one another and what is installed."""
    wheel = wheel_of(tmp_path, one="import msgspec\nimport thing.two", two="")

    assert wheel_trial.import_faults(wheel, tmp_path / "unpacked") == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import bench", "thing.one cannot be imported: ModuleNotFoundError: No module named 'bench'"),
        ("import tools.lock", "thing.one cannot be imported: ModuleNotFoundError: No module named 'tools'"),
        ("import sys; sys.exit(3)", "thing.one cannot be imported: SystemExit: 3"),
    ],
)
def test_a_module_that_needs_the_checkout_is_named(tmp_path: Path, text: str, fault: str) -> None:
    """Although the checkout is installed where the trial runs; the others are still tried."""
    wheel = wheel_of(tmp_path, one=text, two="import thing.one")

    first, *_ = wheel_trial.import_faults(wheel, tmp_path / "unpacked")

    assert first == fault


def test_a_wheel_without_modules_is_a_fault(tmp_path: Path) -> None:
    """Nothing that fails is no proof where nothing is tried."""
    path = tmp_path / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("thing-1.dist-info/METADATA", "")

    assert wheel_trial.import_faults(path, tmp_path / "unpacked") == ["thing-1-py3-none-any.whl has no modules"]


def test_a_wheel_whose_code_comes_from_elsewhere_is_a_fault(tmp_path: Path) -> None:
    """The Python that runs the tests imports the checkout."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    with pytest.raises(ReleaseFault, match="imports"):
        wheel_trial.run_commands(python, tmp_path)


def test_a_command_that_fails_tells_what_it_said(tmp_path: Path) -> None:
    """A cell that ends at once is a fault with its output."""
    program = tmp_path / "bin" / "thermocline"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no model here\nexit 3\n")
    program.chmod(0o755)

    with pytest.raises(ReleaseFault, match=r"exit code 3\n(?s:.)*no model here"):
        wheel_trial.serve(program.with_name("python"), tmp_path)
