"""Phases of a starting cell's processes, for its user. The reading end of :mod:`shared.progress`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import TextIO

from shared.progress import MOST_LINE_BYTES, Phase, parse

WAITING = "waiting for the cell"

_CLEAR_LINE = "\r\x1b[K"

_SCALES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class PhaseLines(asyncio.Protocol):
    """The reader of a child's pipe: it parses phases and skips other lines."""

    def __init__(self, on_phase: Callable[[Phase], None]) -> None:
        """Call ``on_phase``, on the event loop, with each phase as it arrives."""
        self._on_phase = on_phase
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Parse the complete lines; drop an incomplete one of more than MOST_LINE_BYTES."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= MOST_LINE_BYTES else b""
        for line in lines:
            phase = parse(line)
            if phase is not None:
                self._on_phase(phase)


class StartDisplay:
    """A display of phases: on a terminal one line that changes, elsewhere a line for each."""

    def __init__(self, out: TextIO, *, columns: Callable[[], int] | None = None) -> None:
        """Write to ``out``, which is not closed here.

        ``columns`` returns the width of the terminal, in characters; None asks the terminal itself.
        """
        self._out = out
        self._columns = columns or (lambda: shutil.get_terminal_size().columns)
        self._is_terminal = out.isatty()
        self._phases: dict[str, Phase] = {}
        self._is_over = False

    def show(self, process: str, phase: Phase) -> None:
        """Show that ``process`` is in ``phase``. Does nothing after :meth:`close`."""
        if self._is_over:
            return
        before = self._phases.get(process)
        self._phases[process] = phase
        busy = {name: each for name, each in self._phases.items() if each.name}
        if self._is_terminal:
            told = [f"{name}: {described(each)}" for name, each in busy.items()] or [WAITING]
            self._out.write(_CLEAR_LINE + " · ".join(told)[: max(1, self._columns() - 1)])
            self._out.flush()
        elif phase.name and (before is None or before.name != phase.name):
            self._line(f"{process}: {described(phase)}")
        elif not busy and before is not None and before.name:
            self._line(WAITING)

    def close(self) -> None:
        """End the display and clear the terminal's line for later output."""
        if self._is_terminal and self._phases and not self._is_over:
            self._out.write(_CLEAR_LINE)
            self._out.flush()
        self._is_over = True

    def _line(self, text: str) -> None:
        self._out.write(f"  {text}\n")
        self._out.flush()


def described(phase: Phase) -> str:
    """Return a phase with its progress: ``loading weights, 120 of 290 tensors``."""
    if not phase.total:
        return phase.name if not phase.done else f"{phase.name}, {_amount(phase.done, phase.unit)}"
    if not phase.done:
        return f"{phase.name}, {_amount(phase.total, phase.unit)}"
    if phase.unit == "bytes":
        return f"{phase.name}, {100 * phase.done // phase.total} % of {_amount(phase.total, phase.unit)}"
    return f"{phase.name}, {phase.done:,} of {_amount(phase.total, phase.unit)}"


def _amount(count: int, unit: str) -> str:
    if unit != "bytes":
        return f"{count:,} {unit}"
    for scale, name in _SCALES:
        if count >= scale:
            return f"{count / scale:.1f} {name}"
    return f"{count} bytes"
