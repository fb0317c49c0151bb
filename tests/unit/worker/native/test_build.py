"""C files are compiled once for a machine, and only where Python's picture of their structures is right."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from services.worker.native import build
from services.worker.native.build import NotCompiled, load
from services.worker.native.fused import MIRRORS, MatrixStruct

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def fused(mirrors: dict[str, type[ctypes.Structure]]) -> ctypes.CDLL:
    return load("fused", ["-fopenmp"], {"LANES": 16, "BFLOAT16": 0}, mirrors)


def mirror(**fields: type) -> type[ctypes.Structure]:
    """Another picture of ``matrix_t``, with these fields in this order."""
    return type("WrongStruct", (ctypes.Structure,), {"_fields_": list(fields.items())})


@needs_compiler
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (mirror(depth=ctypes.c_int64, weights=ctypes.c_void_p, strips=ctypes.c_int32), "depth of matrix_t"),
        (mirror(weights=ctypes.c_void_p, depth=ctypes.c_int64, strips=ctypes.c_int64), "strips of matrix_t"),
        (mirror(weights=ctypes.c_void_p, depth=ctypes.c_int64), "size of matrix_t"),
        (mirror(weights=ctypes.c_void_p, width=ctypes.c_int64, strips=ctypes.c_int32), "width"),
    ],
    ids=["order", "width", "missing", "name"],
)
def test_a_structure_that_differs_does_not_compile(wrong: type[ctypes.Structure], fault: str) -> None:
    """The message names the structure or the field; the true ones compile."""
    with pytest.raises(NotCompiled, match=fault):
        fused({"matrix_t": wrong})
    fused({**MIRRORS, "matrix_t": MatrixStruct})


@needs_compiler
def test_what_the_compiler_says_is_told() -> None:
    """A file whose constants are not defined says which it lacks."""
    with pytest.raises(NotCompiled, match="BFLOAT16 must be 0 or 1"):
        load("fused", ["-fopenmp"], {"LANES": 16}, {})


@pytest.mark.parametrize(("compiler", "reason"), [("/nowhere/cc", "no C compiler"), ("false", "false ended with 1")])
def test_a_machine_without_a_compiler_is_told(compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose compiler does not work."""
    monkeypatch.setenv("CC", compiler)

    with pytest.raises(NotCompiled, match=reason):
        load("page_rows", (), {}, {})


@needs_compiler
def test_a_library_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second worker of a machine compiles nothing, and half-written files are never left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load("page_rows", (), {}, {})
    runs: list[list[str]] = []
    real = subprocess.run

    def spy(command: list[str], **options: object) -> object:
        runs.append(command)
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(build.subprocess, "run", spy)
    load("page_rows", (), {}, {})

    assert [command[1] for command in runs] == ["--version"]
    assert [path.suffix for path in (tmp_path / "thermocline").iterdir()] == [".so"]
