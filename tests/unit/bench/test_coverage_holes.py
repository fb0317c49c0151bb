"""Sums of a coverage report, and the functions that nothing ran."""

from typing import Any

from bench.coverage_holes import PACKAGES, package_of, summarise


def file(lines: int, run: int, functions: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """One file of a report: statements and those that ran, and the same of each function."""
    return {
        "summary": {"num_statements": lines, "covered_lines": run, "num_branches": 4, "covered_branches": 1},
        "functions": {
            name: {"summary": {"num_statements": of, "covered_lines": ran}} for name, (of, ran) in functions.items()
        },
    }


def test_a_file_belongs_to_the_narrowest_package() -> None:
    """The scheduler's core is not counted as the scheduler's shell."""
    found = [
        package_of(name)
        for name in ("services/scheduler/core/state.py", "services/scheduler/shell.py", "shared/ids.py")
    ]

    assert found == ["services/scheduler/core", "services/scheduler", "shared"]
    assert len(set(PACKAGES)) == len(PACKAGES)


def test_functions_of_which_no_line_ran_are_listed() -> None:
    """A function that ran in part is none of them, nor are a module's own lines and functions without lines."""
    report = {
        "files": {
            "shared/a.py": file(10, 6, {"": (3, 0), "f": (4, 0), "g": (3, 1), "Protocol.h": (0, 0)}),
            "shared/b.py": file(10, 10, {"f": (5, 5)}),
        }
    }

    found = summarise(report)

    assert found["functions_without_a_run"] == {"shared/a.py": ["f"]}
    assert found["packages"]["shared"] == {
        "lines": 20,
        "lines_run": 16,
        "branches": 8,
        "branches_run": 2,
        "lines_percent": 80.0,
        "branches_percent": 25.0,
    }
    assert found["packages"]["all"] == found["packages"]["shared"]
