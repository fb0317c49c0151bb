"""Who knows the policies: everything that folds, and not the core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.scheduler import policies

CORE: tuple[list[str], list[str]] = (["lru"], [])
ALL = (
    ["2q", "arc", "fifo", "gdsf", "hotprefix", "lfu", "lru", "s3-fifo", "sieve", "slru", "thermocline", "w-tinylfu"],
    ["balanced", "fcfs", "lpm"],
)

KNOWN = """
import json
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.core.queue.schedules import SCHEDULES
print(json.dumps([sorted(POLICIES), sorted(SCHEDULES)]))
"""

CHECKED = """
from services.scheduler.checks import check
from services.scheduler.config import SchedulerConfig
from shared.errors import ConfigError
check(SchedulerConfig(policy="arc", schedule="lpm"))
try:
    check(SchedulerConfig(policy="arcs"))
except ConfigError as fault:
    print(fault.message)
"""


def printed_by(code: str) -> str:
    """What a process of its own prints, which has imported nothing but what this code does."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def known_to(module: str) -> tuple[list[str], list[str]]:
    """Names of policies and schedules in a process that has imported this module alone."""
    policies, schedules = json.loads(printed_by(f"import {module}\n{KNOWN}"))
    return policies, schedules


@pytest.mark.parametrize(
    "module",
    [
        "services.scheduler.bootstrap",
        "services.scheduler.replay",
        "thermocline.simulate.__main__",
        "thermocline.replay.__main__",
        "tests.stateful.cell_model",
        "bench.policy_hit_ratio",
    ],
)
def test_whoever_folds_knows_them(module: str) -> None:
    """Nobody else has imported them in that process."""
    assert known_to(module) == ALL


def test_the_core_does_not() -> None:
    """It has the policy that quotas rank by, and no other."""
    assert known_to("services.scheduler.core") == CORE


def test_a_module_more_is_imported_with_the_others() -> None:
    """A new policy is a new file, and no list of them is to be kept."""
    files = {file.stem for file in Path(policies.__file__ or "").parent.glob("*.py")} - {"__init__"}

    assert files <= {name.rpartition(".")[2] for name in sys.modules if name.startswith(f"{policies.__name__}.")}


def test_they_can_be_set() -> None:
    """A scheduler is told so by its settings; a name that is none of them is refused with all that there are."""
    assert f"'arcs' is none of {', '.join(ALL[0])}; did you mean arc" in printed_by(CHECKED)
