"""The client's machine and software. What cannot be read is empty."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from thermocline.load.report import Hardware


def hardware() -> Hardware:
    """Return the hardware of this machine, with its current load average."""
    return Hardware(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        load_average_1min=os.getloadavg()[0],
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part in measuring, by name."""
    found = {"python": platform.python_version()}
    for name in ("thermocline", "httptools", "uvloop"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "(not installed)"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
