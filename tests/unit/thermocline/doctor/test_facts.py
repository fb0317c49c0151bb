"""Facts of machines that lack something: each lack is told, and none ends the doctor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thermocline.doctor import facts as facts_module
from thermocline.doctor.facts import gather


def program(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers for PyTorch's process, whose import takes seconds."""
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", """echo '{"version": "2.13.0"}'"""))


def test_an_interpreter_that_cannot_be_started_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in a folder that this user may not enter."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "not-here"))

    assert gather().torch_error.startswith("cannot start another Python: ")


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the system's."""
    monkeypatch.setenv("CC", str(tmp_path / "no-cc"))

    assert "no-cc" in gather().compiler_error


def test_a_compiler_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the compiler's first line."""
    message = "<stdin>:2:10: fatal error: omp.h: No such file or directory"
    monkeypatch.setenv("CC", program(tmp_path, "cc", f"echo '{message}' >&2; echo more >&2; exit 1"))

    found = gather()

    assert (found.compiler, found.compiler_error) == ("", message)


def test_a_compiler_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named as CC names it."""
    compiler = program(tmp_path, "cc", "exit 0")
    monkeypatch.setenv("CC", compiler)

    found = gather()

    assert (found.torch_version, found.compiler, found.compiler_error) == ("2.13.0", compiler, "")


def test_the_limit_of_a_cgroup_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is what pools may be made of, which is less than the machine's where a unit or a container is limited."""
    monkeypatch.setattr(facts_module, "memory_available_bytes", lambda: 4096)

    assert gather().memory_available == 4096
