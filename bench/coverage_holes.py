"""What the tests run of the shipped packages, and the functions that no test runs.

``./task test:coverage`` runs the tests under coverage.py, in every process that they start, and then this. It reads the
report and writes ``bench/results/coverage_holes.json``. A function counts as run when a line of its body was. Processes
that a test ends by SIGKILL leave no data, and compiled code (C, Triton) is not seen.

``python -m bench.coverage_holes [--report build/coverage/coverage.json]``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import results_file

REPORT = Path("build/coverage/coverage.json")
PACKAGES = (
    "services/gateway",
    "services/scheduler/core",
    "services/scheduler/policies",
    "services/scheduler",
    "services/storage",
    "services/worker/kernels",
    "services/worker",
    "shared",
    "thermocline",
)
"""Folders that are told apart; a file belongs to the first that holds it."""


def package_of(file: str) -> str:
    """The row of the table that a file belongs to."""
    return next((package for package in PACKAGES if file.startswith(package + "/")), file.partition("/")[0])


def share(of: dict[str, int]) -> dict[str, Any]:
    """Lines and branches, and which part of them ran, in percent."""
    branches = of["branches"]
    return of | {
        "lines_percent": round(100 * of["lines_run"] / of["lines"], 1) if of["lines"] else 100.0,
        "branches_percent": round(100 * of["branches_run"] / branches, 1) if branches else 100.0,
    }


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Sums for each package and in all, and the functions of which no line ran, by file."""
    sums: dict[str, dict[str, int]] = {}
    holes: dict[str, list[str]] = {}
    for file, found in sorted(report["files"].items()):
        summary = found["summary"]
        for name in (package_of(file), "all"):
            total = sums.setdefault(name, {"lines": 0, "lines_run": 0, "branches": 0, "branches_run": 0})
            total["lines"] += summary["num_statements"]
            total["lines_run"] += summary["covered_lines"]
            total["branches"] += summary.get("num_branches", 0)
            total["branches_run"] += summary.get("covered_branches", 0)
        missed = [
            name
            for name, function in found["functions"].items()
            if name and function["summary"]["num_statements"] and not function["summary"]["covered_lines"]
        ]
        if missed:
            holes[file] = missed
    order = [name for name in (*PACKAGES, "all") if name in sums]
    return {"packages": {name: share(sums[name]) for name in order}, "functions_without_a_run": holes}


def main() -> None:
    """Read the report and write the result."""
    parser = results_file.arguments(__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON report of coverage.py")
    options = parser.parse_args()
    found = summarise(json.loads(options.report.read_text(encoding="utf-8")))
    path = results_file.write("coverage_holes", found, seed=0)
    for name, row in found["packages"].items():
        print(f"{name:30} {row['lines_percent']:5.1f}% of lines, {row['branches_percent']:5.1f}% of branches")
    functions = sum(len(names) for names in found["functions_without_a_run"].values())
    print(f"{functions} functions without a run, listed in {path}")


if __name__ == "__main__":
    main()
