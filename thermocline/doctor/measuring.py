"""Runs a process that measures and prints its result in its last line, since only workers import torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from shared.errors import ConfigError

MEASURE_SECONDS = 900


def run_measurement(
    module: str,
    flags: Sequence[str],
    said: Callable[[str], None],
    *,
    limit_s: float = MEASURE_SECONDS,
    doing: str = "measuring",
    advice: str = "try fewer tokens",
) -> str:
    """Return the last line that ``python -m module`` prints; ``said`` gets the earlier ones as they come.

    Raises ConfigError with the last line of stderr when it fails, or when it takes more than ``limit_s`` seconds; its
    message names ``doing``, and for the latter ``advice``.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            last = _last_line(process, said)
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # Interrupted: the process must not go on by itself.
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if is_late.is_set():
            raise ConfigError(f"{doing} took more than {limit_s:.0f} s: {advice}")
        if code != 0:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise ConfigError(f"{doing} failed: {lines[-1] if lines else f'exit code {code}'}")
    return last


def _last_line(process: subprocess.Popen[str], said: Callable[[str], None]) -> str:
    last = ""
    for line in process.stdout or ():
        if last:
            said(last)
        last = line.strip()
    return last
