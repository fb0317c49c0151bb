"""C files are compiled once for a machine, and only where Python's picture of their structures is right."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from services.worker.native.build import NotCompiled, load
from services.worker.native.decode import compile_decode
from services.worker.native.extend import compile_extend
from services.worker.native.fused import MIRRORS, MatrixStruct
from services.worker.native.page_rows import native_rows
from shared.messages.pools import KvGeometry
from shared.native import build

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test could not compile is its own."""
    monkeypatch.setattr(build, "missing", {})


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty place for this test's libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fused(mirrors: dict[str, type[ctypes.Structure]]) -> ctypes.CDLL:
    return load("fused", ["-fopenmp"], {"LANES": 16, "BFLOAT16": 0, "ROUNDED": 0}, mirrors)


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


@pytest.mark.parametrize(
    ("compiler", "reason"), [("/nowhere/cc", "there is no C compiler"), ("false", "false ended with 1")]
)
def test_kernels_that_are_missing_are_announced(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """Without a compiler that works there are portable paths, a warning for each kernel, and a shortfall to tell of."""
    monkeypatch.setenv("CC", compiler)
    geometry = KvGeometry(layers=1, kv_heads=2, head_dim=32, page_size=16, dtype="float32")

    with capture_logs() as logged:
        found = [
            compile_decode(geometry, 4),
            compile_extend.__wrapped__(32, 2, torch.float32),
            native_rows.__wrapped__(),
        ]
        compile_decode(geometry, 4)

    names = ["decode", "extend", "page_rows"]
    assert found == [None, None, None]
    assert [(each["event"], each["log_level"], each["library"]) for each in logged] == [
        ("native_code_missing", "warning", name) for name in names
    ]
    assert list(build.missing) == names
    assert all(said.startswith(reason) for said in build.missing.values())


@needs_compiler
def test_what_can_be_compiled_again_is_missing_no_more() -> None:
    """A shortfall is told until it has ended."""
    build.announce_missing("page_rows", "there was no compiler")
    load("page_rows", (), {}, {})

    assert build.missing == {}


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_reason_to_be_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """The library is compiled for this process alone, which is announced, and leaves no file."""
    cache.write_text("a file where the folder should be")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    with capture_logs() as logged:
        library = load("page_rows", (), {}, {})

    assert library.move_rows
    assert [each["event"] for each in logged] == ["native_code_not_kept"]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert build.missing == {}


@needs_compiler
def test_a_library_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The second worker of a machine compiles nothing, and half-written files are never left behind."""
    load("page_rows", (), {}, {})
    runs: list[list[str]] = []
    real = subprocess.run

    def spy(command: list[str], **options: object) -> object:
        runs.append(command)
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", spy)
    load("page_rows", (), {}, {})

    assert [command[1] for command in runs] == ["--version"]
    assert [path.suffix for path in (cache / "thermocline").iterdir()] == [".so"]
