"""Compiles a C source for this machine, once per source, flags, compiler and processor.

What it builds is optional everywhere: whoever asks keeps a portable path for machines without a C compiler.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_COMPILE_SECONDS = 60


def build(name: str, source: str, flags: Sequence[str]) -> Path:
    """The path of a shared library made of ``source``, compiled now unless an equal one is in this user's cache.

    Raises OSError or subprocess.SubprocessError where it cannot be compiled.
    """
    compiler = os.environ.get("CC", "cc")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    identity = "\0".join([source, *flags, version, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thermocline"
    target = folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            written, built = Path(scratch) / f"{name}.c", Path(scratch) / f"{name}.so"
            written.write_text(source, encoding="ascii")
            command = [compiler, *flags, "-o", str(built), str(written)]
            subprocess.run(command, capture_output=True, timeout=_COMPILE_SECONDS, check=True)
            built.replace(target)  # Two processes may compile at once; either result is good.
    return target


def _processor() -> str:
    """What ``-march=native`` depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
