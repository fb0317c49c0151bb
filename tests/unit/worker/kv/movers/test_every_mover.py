"""One suite for all movers: bit-equal to a loop over rows, for every page size, dtype and geometry."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from services.worker.native.page_rows import native_rows
from tests.cases import case
from tests.unit.worker.kernels.interpreted import Interpreter, running_interpreter
from tests.unit.worker.kv.movers.cases import EVERY_CHECK, Case, every_case


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with running_interpreter() as running:
        yield running


@pytest.mark.parametrize("mover", ["per_page", "batched", "numpy"])
@pytest.mark.parametrize("check", EVERY_CHECK, ids=lambda check: check.__name__)
def test_a_mover_on_cpu(mover: str, check: Callable[[Case], None]) -> None:
    """Rows go where they belong, wrong ones nowhere, in both directions and from a neighbour."""
    for geometry in every_case(mover):
        with case(geometry=geometry):
            check(geometry)


@pytest.mark.parametrize("check", EVERY_CHECK, ids=lambda check: check.__name__)
def test_the_kernel_interpreted(check: Callable[[Case], None], interpreter: Interpreter) -> None:
    """The same for the Triton kernel, with more programs than one. A GPU runs it for every geometry (tests/gpu)."""
    for geometry in every_case("gpu_assisted"):
        if geometry.page_size == 64 or (geometry.dtype != "float32" and geometry.page_size != 16):
            continue  # It moves bytes, and a dtype is the length of a row to it, as a page size is.
        with case(geometry=geometry):
            interpreter.call(check, geometry)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_native_code_is_what_batched_uses_here() -> None:
    """Where a C compiler is, the suite above has tested C code and numpy, not numpy twice."""
    assert native_rows() is not None
