"""The timeline of a run: what happened when, on disk as JSON lines and, as far as it matters, on the terminal."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be. ``fault`` is the last that began before it, -1 for none."""

    at_s: float
    fault: int
    what: str
    seen: str

    def __str__(self) -> str:
        return f"[{self.at_s:8.2f} s, after fault {self.fault}] {self.what}: {self.seen}"


class Journal:
    """Times are seconds since ``origin_s`` (``time.monotonic``), which is set when the load begins."""

    def __init__(self, path: Path, console: Console) -> None:
        self.violations: list[Violation] = []
        self.origin_s = time.monotonic()
        self.last_fault = -1
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._console = console

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.origin_s

    def write(self, what: str, **facts: Any) -> None:
        """One line of the timeline."""
        self._file.write(json.dumps({"at_s": round(self.now_s, 3), "what": what, **facts}) + "\n")

    def say(self, text: str) -> None:
        """One line for an observer."""
        self._console.print(text, highlight=False, markup=False)

    def complain(self, what: str, seen: str) -> None:
        """Note a violation, and say it at once."""
        violation = Violation(self.now_s, self.last_fault, what, seen)
        self.violations.append(violation)
        self.write("violation", fault=self.last_fault, kind=what, seen=seen)
        self._console.print(f"VIOLATION {violation}", style="red", highlight=False, markup=False)

    def close(self) -> None:
        self._file.close()
