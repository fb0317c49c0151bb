"""Committed bounds of what compiled kernels take of a GPU, and the command that checks or records them.

    python -m tests.unit.worker.kernels.bounds            # compile with the installed Triton, and compare
    python -m tests.unit.worker.kernels.bounds --record   # write this Triton's rows of compile_bounds.json

The table has a row for each kernel of each case, architecture and Triton. Triton's compiler and its assembler are
parts of its wheel, so what they give is the same on every machine; each version is tried in an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import triton

from tests.unit.worker.kernels.compile_cases import CASES, SHARED_BYTES
from tests.unit.worker.kernels.footprints import Footprint, footprint
from tests.unit.worker.kernels.launches import launches_of

TABLE = Path(__file__).with_name("compile_bounds.json")

SUPPORTED = ("3.6", "3.7")
"""Lines of Triton that ``pyproject.toml`` admits."""

KIB = 1024
# Shared memory that one program may have (CUDA C++ Programming Guide, table of compute capabilities). sm_89 stands for
# the cards of 24 GB, which have as much as sm_86.
SHARED_LIMITS = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}


class Row(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One bound. ``kernel`` has a number behind it where a case compiles it more than once."""

    case: str
    kernel: str
    arch: str
    triton: str
    spills: int
    stack: int
    shared: int
    buffers: tuple[int, ...]
    read_bytes: int

    @property
    def name(self) -> tuple[str, str, str, str]:
        return self.case, self.kernel, self.arch, self.triton


def installed() -> str:
    """The installed Triton's line, such as 3.7."""
    return ".".join(triton.__version__.split(".")[:2])


def measured(case: str, call: Callable[[], object], capability: int) -> Iterator[Row]:
    """Compile each kernel that ``call`` launches, once, for sm_``capability``."""
    seen: dict[str, int] = {}
    keys = set()
    SHARED_BYTES.set(SHARED_LIMITS[capability])
    for launch in launches_of(call):
        variant = launch.variant(capability)
        if variant.key in keys:
            continue
        keys.add(variant.key)
        name = variant.kernel.__name__
        seen[name] = seen.get(name, 0) + 1
        found = footprint(variant.compile())
        yield _row(case, name if seen[name] == 1 else f"{name} {seen[name]}", capability, found)


def _row(case: str, kernel: str, capability: int, found: Footprint) -> Row:
    return Row(
        case=case, kernel=kernel, arch=f"sm_{capability}", triton=installed(), spills=found.spills, stack=found.stack,
        shared=found.shared, buffers=found.buffers, read_bytes=found.read_bytes,
    )  # fmt: skip


def excess(row: Row, bound: Row | None) -> list[str]:
    """In which ways a kernel takes more than it may, or loads with less: fewer blocks ahead, or narrower reads."""
    if bound is None:
        return ["no bound is committed"]
    told = [
        f"{name} {getattr(row, name)}, bound {getattr(bound, name)}"
        for name in ("spills", "stack", "shared")
        if getattr(row, name) > getattr(bound, name)
    ]
    if len(row.buffers) < len(bound.buffers) or any(a < b for a, b in zip(row.buffers, bound.buffers, strict=False)):
        told.append(f"buffers {list(row.buffers)}, bound {list(bound.buffers)}")
    if row.read_bytes < bound.read_bytes:
        told.append(f"reads {row.read_bytes} bytes at a time, bound {bound.read_bytes}")
    return told


def committed() -> dict[tuple[str, str, str, str], Row]:
    rows = msgspec.json.decode(TABLE.read_bytes(), type=list[Row])
    return {row.name: row for row in rows}


def record(rows: Mapping[tuple[str, str, str, str], Row]) -> None:
    """Write the table, a row to a line, so that changes of different kernels merge."""
    lines = [json.dumps(msgspec.to_builtins(row)) for _, row in sorted(rows.items())]
    TABLE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="write what was found into the table")
    parser.add_argument("cases", nargs="*", help="parts of names of cases; all without")
    options: Any = parser.parse_args(argv)
    if installed() not in SUPPORTED:
        print(f"bounds: Triton {triton.__version__} is not among {', '.join(SUPPORTED)}", file=sys.stderr)
        return 2
    table = committed() if TABLE.exists() else {}
    chosen = [name for name in CASES if not options.cases or any(part in name for part in options.cases)]
    kept = {
        name: row
        for name, row in table.items()
        if row.case in CASES and (row.triton != installed() or row.case not in chosen)
    }
    faults = 0
    for case in chosen:
        for capability, limit in SHARED_LIMITS.items():
            for row in measured(case, CASES[case], capability):
                told = excess(row, row if options.record else table.get(row.name))
                if row.shared > limit:
                    told.append(f"shared {row.shared}, and {row.arch} has {limit}")
                faults += bool(told)
                print(f"{case}: {row.kernel} {row.arch}: {'; '.join(told) or 'ok'}", flush=True)
                kept[row.name] = row
    if options.record:
        record(kept)
    print(f"bounds: {len(chosen)} cases with Triton {triton.__version__}, {faults} beyond their bounds")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
