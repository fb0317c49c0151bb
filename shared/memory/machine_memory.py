"""The free memory of this machine, or of the container that this process runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

SHM_DIRECTORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Free bytes: of memory without swapping or exceeding a cgroup's limit, and of ``/dev/shm``.

    A page in ``/dev/shm`` is a page of memory, so files there take from both.
    """

    memory_bytes: int
    shm_bytes: int


def machine_memory() -> MachineMemory:
    """Return the free memory now. Raises ConfigError on a system without ``/dev/shm`` or ``/proc/meminfo``."""
    return MachineMemory(memory_available_bytes(), free_shared_memory())


def free_shared_memory() -> int:
    """Return the free bytes of ``/dev/shm``. Raises ConfigError where there is none."""
    try:
        filesystem = os.statvfs(SHM_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"there is no {SHM_DIRECTORY} on this system: {error}") from error
    return filesystem.f_bavail * filesystem.f_frsize


def memory_available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return ``MemAvailable``, or what the limit of a cgroup leaves where that is less. Raises ConfigError."""
    return min([_mem_available(proc), *_left_in_cgroups(proc, cgroups)])


def _mem_available(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{proc / 'meminfo'} has no MemAvailable")


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the free bytes of each limited cgroup above this process: its limit less the used, unreclaimable memory."""
    for line in _read(proc / "self/cgroup").splitlines():
        controllers, _, name = line.partition(":")[2].partition(":")
        if not controllers:  # Version 2.
            limit, usage, cache, root = "memory.max", "memory.current", "inactive_file", cgroups
        elif "memory" in controllers.split(","):
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            root = cgroups / "memory"
        else:
            continue
        # Within a container the name may be that of the host; the container's own cgroup is mounted at the root then.
        place = root / name.lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(root):
                break
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                yield max(0, most - used + _cached(folder / "memory.stat", cache))


def _number(path: Path) -> int | None:
    """Return the number in a file; None without one, such as for ``max`` (no limit)."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _cached(path: Path, name: str) -> int:
    """Return the bytes of cached files that the kernel evicts first."""
    found = (line.split() for line in _read(path).splitlines())
    return next((int(fields[1]) for fields in found if len(fields) == 2 and fields[0] == name), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
