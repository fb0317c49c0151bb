"""The file of a run of the GPU benchmark: whole after every part, and readable by whoever comes later.

It is replaced at once when a part begins or ends, so it is complete JSON whenever its process is killed. Parts write
what they find into a folder beside it, which the end of a run removes; of a killed run the summary reads there what the
part that was running had found.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import results_file
from bench.gpu.part_process import Outcome, results_of
from bench.gpu.parts import Part
from bench.gpu.reading import machine

LIBRARIES = ("triton", "transformers", "safetensors", "numpy", "nats-py")

RUNNING, WAITING = "running", "not begun"


class EvidenceFile:
    """``out`` is None where nothing is to be kept. ``folder`` is where parts write."""

    def __init__(self, out: Path | None, device: torch.device, minutes: float, scratch: Path) -> None:
        self._out, self._minutes = out, minutes
        self._device = described(device)
        self.folder = scratch if out is None else parts_folder(out)
        if out is not None:
            shutil.rmtree(self.folder, ignore_errors=True)  # Of a run that was killed.
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, outcomes: Sequence[Outcome], waiting: Sequence[Part], *, running: bool) -> dict[str, Any]:
        """Replace the file; with ``running`` the first of those that wait is under way. Returns what is in it."""
        states = {part.name: {"state": WAITING} for part in waiting}
        if running and waiting:
            states[waiting[0].name] = {"state": RUNNING}
        found = {
            **self._device,
            "libraries": {name: _version(name) for name in LIBRARIES},
            "minutes": self._minutes,
            "parts": {**{outcome.part: _told(outcome) for outcome in outcomes}, **states},
        }
        if self._out is not None:
            results_file.write("gpu", found, seed=0, out=self._out)
        return found

    def close(self) -> None:
        """Everything is in the file; what the parts wrote goes."""
        if self._out is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def described(device: torch.device) -> dict[str, Any]:
    """See :func:`bench.gpu.reading.machine`. A GPU is asked by a process that ends: this one keeps no memory of it."""
    if device.type != "cuda":
        return machine(device)
    code = "import json, torch; from bench.gpu.reading import machine; print(json.dumps(machine(torch.device('cuda'))))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(asked.stdout)
    return {**found, "driver": _driver()}


def parts_folder(out: Path) -> Path:
    return out.with_name(f"{out.stem}.parts")


def read(out: Path) -> dict[str, Any]:
    """The results of a file, with what a part that was killed with its run had found. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["results"]
    for name, part in found["parts"].items():
        if part["state"] == RUNNING:
            part["state"] = "killed"
            part["results"] = results_of(parts_folder(out) / f"{name}.json")
    return found


def is_whole(found: dict[str, Any]) -> bool:
    """Whether every part ran and stopped by itself."""
    return all(part["state"] in ("whole", "cut short") for part in found["parts"].values())


def table_of(found: dict[str, Any]) -> Table:
    """What people read."""
    table = Table("part", "what", "", "", title=f"GPU benchmark: {found['gpu'] or 'no GPU'}", title_justify="left")
    for name, part in found["parts"].items():
        told = part.get("reason", "").strip().splitlines()
        # Of a part that failed the last line says why, of others the first.
        why = "" if not told else told[-1] if part["state"] == "failed" else told[0]
        table.add_row(f"{name} ({part['state']}, {part.get('seconds', 0):.0f} s)", why, "", "", style="bold")
        for what, value, unit in part.get("results", {}).get("headline", []):
            table.add_row("", what, "-" if value is None else f"{value:.3g}", unit)
    return table


def _told(outcome: Outcome) -> dict[str, Any]:
    reason = {"reason": outcome.reason} if outcome.reason else {}
    return {"state": outcome.state, "seconds": round(outcome.seconds, 1), **reason, "results": outcome.results}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version, as its own tool has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0]
