"""The timeline of a run: events as JSON lines on disk, and the main ones on the terminal."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of what must always hold. ``fault`` is the index of the last fault before it, -1 for none."""

    at_s: float
    fault: int
    what: str
    seen: str

    def __str__(self) -> str:
        """Return one line with the time, the last fault, the kind of violation and what was seen."""
        return f"[{self.at_s:8.2f} s, after fault {self.fault}] {self.what}: {self.seen}"


class Journal:
    """The timeline and its violations, in seconds since ``origin_s`` (``time.monotonic``), set when the load begins."""

    def __init__(self, path: Path, console: Console) -> None:
        """Append to the file ``path`` until :meth:`close`. Raises OSError if it cannot be opened.

        ``console`` gets the lines of :meth:`say`, and every violation.
        """
        self.violations: list[Violation] = []
        self.origin_s = time.monotonic()
        self.last_fault = -1
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._console = console

    @property
    def now_s(self) -> float:
        """Seconds since ``origin_s``."""
        return time.monotonic() - self.origin_s

    def write(self, what: str, **facts: Any) -> None:
        """Append one event to the timeline on disk."""
        self._file.write(json.dumps({"at_s": round(self.now_s, 3), "what": what, **facts}) + "\n")

    def say(self, text: str) -> None:
        """Print one line on the terminal."""
        self._console.print(text, highlight=False, markup=False)

    def complain(self, what: str, seen: str) -> None:
        """Record a violation, and print it at once."""
        violation = Violation(self.now_s, self.last_fault, what, seen)
        self.violations.append(violation)
        self.write("violation", fault=self.last_fault, kind=what, seen=seen)
        self._console.print(f"VIOLATION {violation}", style="red", highlight=False, markup=False)

    def close(self) -> None:
        """Close the file of the timeline; nothing can be written afterwards."""
        self._file.close()
