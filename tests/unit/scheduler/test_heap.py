"""Freed memory of the scheduler's process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

KEEPING = """
import sys
from pathlib import Path
from services.scheduler.heap import keep_heap, trim_heap

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

if "keep" in sys.argv:
    keep_heap()
before = resident_mib()
blocks = [b"x" * 2**20 for _ in range(64)]
del blocks
freed = resident_mib()
trim_heap()
print(freed - before, resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such settings")
@pytest.mark.parametrize("argument", ["keep", "leave"])
def test_freed_memory_is_kept_until_the_heap_is_trimmed(argument: str) -> None:
    """It is returned at once by default, and the next message would fault each page in anew."""
    done = subprocess.run([sys.executable, "-c", KEEPING, argument], capture_output=True, text=True, check=True)
    freed, trimmed = map(int, done.stdout.split())

    assert (freed > 56) is (argument == "keep")
    assert trimmed < 8
