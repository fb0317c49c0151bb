"""The kernels compile on a machine without a GPU, and take no more of one than is committed."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import triton
from packaging.requirements import Requirement
from triton.runtime.jit import JITFunction

from services.worker import kernels
from services.worker.kernels import page_gather
from services.worker.kernels.row_checksums import check_rows, constants_on, sums_for
from services.worker.kv.page_memory import PageLayout
from shared.messages.pools import KvGeometry
from tests.unit.worker.kernels import bounds
from tests.unit.worker.kernels.compile_cases import CASES
from tests.unit.worker.kernels.launches import launches_of

ROOT = Path(__file__).parents[4]


def capabilities(case: str) -> list[int]:
    """sm_90 and one more, another from case to case; ``./task test:kernels`` compiles every case for all.

    sm_89 only where Triton makes other code than for sm_80: it converts 8 bits by itself, and has less of the shared
    memory by which pages are moved.
    """
    others = [each for each in bounds.SHARED_LIMITS if each != 90 and (each != 89 or case.startswith(("fp8", "move")))]
    return [90, others[list(CASES).index(case) % len(others)]]


@pytest.mark.skipif(
    bounds.installed() not in bounds.SUPPORTED,
    reason=f"bounds are of Triton {' and '.join(bounds.SUPPORTED)}, and {triton.__version__} is installed",
)
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_within_their_bounds(case: str) -> None:
    """Spills, stack, shared memory, blocks of K and V ahead and the width of reads."""
    table = bounds.committed()

    rows = [row for capability in capabilities(case) for row in bounds.measured(case, CASES[case], capability)]

    assert {row.arch for row in rows} == {f"sm_{capability}" for capability in capabilities(case)}
    assert {row.name: told for row in rows if (told := bounds.excess(row, table.get(row.name)))} == {}


def test_the_table_holds_each_kernel_for_each_architecture_and_triton() -> None:
    """None is left out, and none is left over from a case that is gone."""
    launched = {case: {launch.kernel.__name__ for launch in launches_of(call)} for case, call in CASES.items()}
    expected = {
        (case, kernel, f"sm_{capability}", version)
        for case, names in launched.items()
        for kernel in names
        for capability in bounds.SHARED_LIMITS
        for version in bounds.SUPPORTED
    }

    found = {(case, kernel.split(" ")[0], arch, version) for case, kernel, arch, version in bounds.committed()}

    assert found == expected


def test_no_kernel_is_without_a_case() -> None:
    """Each function under services/ that Triton launches is compiled by some case, or is called by one that is."""
    launched = {launch.kernel.fn.__name__ for call in CASES.values() for launch in launches_of(call)}

    written = {name for name in _kernels_of_the_worker() if name.endswith("_kernel")}

    assert written - launched == set()
    assert launched <= written


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("rotate") and "fp32" not in case])
def test_rotations_round_products_before_they_add_them(case: str) -> None:
    """As the models do; with norms, which sum in fp32, products may be fused."""
    launches = [launch for launch in launches_of(CASES[case]) if not launch.kwargs["HAS_NORM"]]

    assert launches
    for launch in launches:
        assert "fma.rn.f32" not in launch.variant(90).compile().asm["ptx"]


@pytest.mark.parametrize("is_load", [True, False])
def test_planes_of_any_size_are_moved_and_checked(is_load: bool) -> None:
    """A pool of 140 GiB of three layers has planes of 23: strides beyond 32 bits, in words too."""
    geometry = KvGeometry(layers=3, kv_heads=8, head_dim=64, page_size=16, dtype="bfloat16")
    host, device = (
        PageLayout.page_first(geometry, 1),
        PageLayout.layer_first(geometry, 140 * 2**30 // geometry.page_bytes),
    )
    pool, numbers = torch.zeros(64, dtype=torch.uint8), torch.zeros((2, 3), dtype=torch.int32)
    seeds, cpu = torch.zeros(3, dtype=torch.int64), torch.device("cpu")

    def move() -> None:
        begin, end = (host, device) if is_load else (device, host)
        page_gather.copy_pages(pool, begin, pool, end, numbers, range(1), programs=2)

    def check() -> None:
        wrong, sums = torch.zeros(3, dtype=torch.uint8), sums_for(device.half_bytes, 3, cpu)
        check_rows(pool, device, 0, numbers[0], seeds, seeds, wrong, constants=constants_on(cpu), sums=sums)

    compiled = {
        each.kernel.__name__ for call in (move, check) for each in launches_of(call) if each.variant(90).compile()
    }
    assert compiled == {"copy_pages_kernel", "block_sums_kernel", "join_sums_kernel"}


def test_each_bound_is_below_what_an_architecture_has() -> None:
    """A program that asks for more shared memory than there is would not be launched."""
    beyond = [
        row.name
        for row in bounds.committed().values()
        if row.shared > bounds.SHARED_LIMITS[int(row.arch[len("sm_") :])]
    ]

    assert beyond == []


def test_versions_are_those_that_may_be_installed() -> None:
    """A Triton that the package admits has bounds, and one that has bounds is admitted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted = next(
        requirement.specifier
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "triton"
    )

    assert tuple(f"3.{minor}" for minor in range(30) if f"3.{minor}.0" in admitted) == bounds.SUPPORTED


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"spills": 3}, ["spills 3, bound 2"]),
        ({"stack": 16}, ["stack 16, bound 8"]),
        ({"shared": 1025}, ["shared 1025, bound 1024"]),
        ({"buffers": (1, 2)}, ["buffers [1, 2], bound [2, 2]"]),
        ({"buffers": (2,)}, ["buffers [2], bound [2, 2]"]),
        ({"read_bytes": 8}, ["reads 8 bytes at a time, bound 16"]),
        ({"spills": 0, "stack": 0, "shared": 0, "buffers": (3, 3)}, []),
    ],
)
def test_what_exceeds_a_bound_is_named(change: dict[str, Any], told: list[str]) -> None:
    """More memory than committed, or less of what makes loads fast; less memory is no fault."""
    bound = bounds.Row(
        case="a", kernel="k", arch="sm_90", triton="3.7", spills=2, stack=8, shared=1024, buffers=(2, 2), read_bytes=16
    )

    assert bounds.excess(msgspec.structs.replace(bound, **change), bound) == told
    assert bounds.excess(bound, None) == ["no bound is committed"]


def test_each_architecture_is_compiled_for() -> None:
    """By some kernel of the suite; sm_89 by those that differ there."""
    assert {each for case in CASES for each in capabilities(case)} == set(bounds.SHARED_LIMITS)


def _kernels_of_the_worker() -> set[str]:
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        values = vars(importlib.import_module(module.name)).items()
        found |= {name for name, value in values if isinstance(value, JITFunction)}
    return found
