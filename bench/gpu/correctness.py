"""Runs ``tests/gpu`` and stops at the first failure: figures of what computes wrongly are worth nothing.

Attention in bfloat16 beside its oracle comes first, because that is what serves and what no processor has run; then
everything else. What there was no time for is counted. The tests need the development dependencies (pytest,
pytest-timeout, pytest-asyncio, hypothesis); where they are missing the part fails and says so.

With ``--cpu`` the tests of the kernels in Triton's interpreter run in their place, and those of ``tests/gpu`` are only
collected.

``python -m bench.gpu.correctness [--quick | --cpu] [--seconds 90]``
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from bench.gpu import reading
from bench.gpu.part_process import end_group

ROOT = Path(__file__).parents[2]

END_S = 15.0
"""For pytest to write down what it has, once it is told to end."""

ALL_S = 3600.0
"""Where no ``--seconds`` bounds it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Arguments of one run of pytest."""

    name: str
    arguments: tuple[str, ...]


BFLOAT16 = Selection("bfloat16 attention beside oracles", ("tests/gpu/test_paged_attention.py", "-k", "bfloat16"))
REST = Selection("all other tests of tests/gpu", ("tests/gpu", "-k", "not (test_paged_attention and bfloat16)"))
INTERPRETED = Selection(
    "kernels in Triton's interpreter",
    ("tests/unit/worker/kernels/test_kv_write.py", "tests/unit/worker/kernels/test_page_gather.py"),
)


def tested(selection: Selection, seconds: float, *, may_skip: bool) -> dict[str, Any]:
    """Numbers of tests by what they came to, and the messages of those that failed. Unless ``may_skip``, a run in
    which none passed has failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="thermocline-bench-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *selection.arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        is_cut = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_cut = True
        finally:
            end_group(process, END_S)
        found = _counted(report)
    found |= {"name": selection.name, "seconds": round(time.monotonic() - began, 1), "is_cut": is_cut}
    # pytest's codes: 0 for tests that passed, 5 where files were skipped as a whole; 2 for faults that it counts, too.
    is_known = process.returncode == 0 or (process.returncode == 5 and found["skipped"])
    if not (is_cut or found["failed"]) and not (is_known and (found["passed"] or may_skip)):
        found["failed"] += 1
        found["messages"].append(f"pytest ended with exit code {process.returncode}, {found['skipped']} skipped")
    return found


def _counted(report: Path) -> dict[str, Any]:
    """What JUnit's file says."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "messages": []}
    if not report.exists():
        return found
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago.
        fault = next((each for each in case if each.tag in ("failure", "error")), None)
        if fault is not None:
            found["failed"] += 1
            found["messages"].append(
                f"{case.get('classname')}.{case.get('name')}: {fault.get('message')}\n{fault.text}"
            )
        elif any(each.tag == "skipped" for each in case):
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return found


def headline(runs: list[dict[str, Any]]) -> reading.Headline:
    return [
        (each["name"], float(each["passed"]), f"passed, {each['failed']} failed, {each['skipped']} skipped"
         + (", and then time was over" if each["is_cut"] else ""))
        for each in runs
    ]  # fmt: skip


def main() -> None:
    run = reading.begin("correctness", __doc__)
    selections = run.choose([BFLOAT16, REST], [BFLOAT16], [INTERPRETED, BFLOAT16])
    runs: list[dict[str, Any]] = []
    results = {"runs": runs}
    for selection in selections:
        left_s = min(ALL_S, run.budget.left_s - END_S)
        if runs and left_s <= 0:
            run.budget.left_out.append(selection.name)
            continue
        runs.append(tested(selection, max(1.0, left_s), may_skip=run.is_tiny))
        run.keep(results)
        if runs[-1]["is_cut"]:
            run.budget.left_out.append(f"rest of: {selection.name}")
        if runs[-1]["failed"]:
            raise SystemExit("\n".join(runs[-1]["messages"]))
    run.finish(results, headline(runs))


if __name__ == "__main__":
    main()
