"""One part of the benchmark in a process of its own, which may fail, hang or be killed without harm to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.gpu.parts import Allotment, Part
from bench.gpu.stopping import Stopped
from shared.lifecycle import die_with_parent

State = Literal["whole", "cut short", "failed", "out of time", "stopped", "left out"]

STOP_S = 20.0
"""For a part that is told to end to take its processes and its memory with it."""

SHOWN_LINES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part. ``reason`` is the end of what it printed, where it failed; ``results`` are then what it
    had found until then.
    """

    part: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    results: dict[str, Any] = field(default_factory=dict)


def run_part(
    part: Part, allotted: Allotment, flags: Sequence[str], folder: Path, *, package: str = "bench.gpu"
) -> Outcome:
    """Run it, for ``limit_s`` at the most and ``STOP_S`` more; never raises for what a part does, nor Stopped."""
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    command = [sys.executable, "-m", f"{package}.{part.name}", "--seconds", f"{allotted.share_s:.0f}"]
    began = time.monotonic()
    code: int | None = None
    stopped = ""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [*command, "--out", str(out), *flags],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A run that is killed leaves no part on the GPU. This process has no other threads.
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
        try:
            code = process.wait(allotted.limit_s)
        except subprocess.TimeoutExpired:
            pass  # See below.
        except Stopped as error:
            stopped = str(error)
        finally:
            if code != 0:  # What ends well takes its processes with it.
                end_group(process)
    seconds = time.monotonic() - began
    results = results_of(out)
    if stopped:
        return Outcome(part.name, "stopped", seconds, stopped, results)
    if code is None:
        return Outcome(part.name, "out of time", seconds, f"killed after {seconds:.0f} s\n{_tail(log)}", results)
    if code or not results:
        return Outcome(part.name, "failed", seconds, f"exit code {code}\n{_tail(log)}", results)
    return Outcome(part.name, "whole" if results.get("is_whole") else "cut short", seconds, results=results)


def end_group(process: subprocess.Popen[bytes], patience_s: float = STOP_S) -> None:
    """As Ctrl-C does, so that it can clean up; then by force, with whatever it has started and left in its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass  # It has had its chance.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # The usual end: nothing is left of it.
    process.wait()


def results_of(file: Path) -> dict[str, Any]:
    """What a part has written so far; nothing if that is not whole."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-SHOWN_LINES:])
