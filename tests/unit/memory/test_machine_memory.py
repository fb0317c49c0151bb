"""What this machine, or its container, has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.memory.machine_memory import machine_memory, memory_available_bytes

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """``/proc`` and ``/sys/fs/cgroup`` of a machine with 8 GiB available, and a process in no limited group."""
    write(tmp_path / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/cell.scope\n")
    write(tmp_path / "cgroup/user.slice/cell.scope/memory.max", "max\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def left(system: Path) -> int:
    return memory_available_bytes(system / "proc", system / "cgroup")


def test_without_a_limit_it_is_what_the_machine_has(system: Path) -> None:
    """``max`` is no limit, and a group without files has none."""
    assert left(system) == 8 * GIB


def test_a_limit_anywhere_above_the_process_counts(system: Path) -> None:
    """What it leaves is the limit less what is used; files that are only cached are given up first."""
    slice_ = system / "cgroup/user.slice"
    write(slice_ / "memory.max", f"{4 * GIB}\n")
    write(slice_ / "memory.current", f"{3 * GIB}\n")
    write(slice_ / "memory.stat", f"anon {2 * GIB}\ninactive_file {GIB}\n")

    assert left(system) == 2 * GIB


def test_a_container_whose_group_has_another_name_outside_is_bounded_too(system: Path) -> None:
    """Where the name means nothing here, the folder that is mounted is the container's own."""
    write(system / "proc/self/cgroup", "0::/docker/abc\n")
    write(system / "cgroup/memory.max", f"{GIB}\n")
    write(system / "cgroup/memory.current", "0\n")

    assert left(system) == GIB


def test_version_1_is_understood(system: Path) -> None:
    """The controller has a folder and names of its own."""
    write(system / "proc/self/cgroup", "5:cpu:/\n4:memory,hugetlb:/job\n")
    write(system / "cgroup/memory/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(system / "cgroup/memory/job/memory.usage_in_bytes", f"{GIB}\n")

    assert left(system) == GIB


def test_a_system_without_figures_is_refused(tmp_path: Path) -> None:
    """The message names what is missing."""
    with pytest.raises(ConfigError, match="no MemAvailable"):
        left(tmp_path)


def test_this_machine_tells() -> None:
    """Both are more than nothing wherever tests run."""
    found = machine_memory()

    assert found.memory_bytes > 0
    assert found.shm_bytes > 0
