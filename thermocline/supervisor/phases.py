"""What the processes of a starting cell are busy with, for its user. The reading end of :mod:`shared.progress`."""

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
    """Cuts what comes through a child's pipe into phases. Lines that are none are passed over."""

    def __init__(self, on_phase: Callable[[Phase], None]) -> None:
        self._on_phase = on_phase
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= MOST_LINE_BYTES else b""
        for line in lines:
            phase = parse(line)
            if phase is not None:
                self._on_phase(phase)


class StartDisplay:
    """Shows phases: a line for each off a terminal, and one line that changes on a terminal."""

    def __init__(self, out: TextIO, *, columns: Callable[[], int] | None = None) -> None:
        self._out = out
        self._columns = columns or (lambda: shutil.get_terminal_size().columns)
        self._is_terminal = out.isatty()
        self._phases: dict[str, Phase] = {}
        self._is_over = False

    def show(self, process: str, phase: Phase) -> None:
        """``process`` is in ``phase`` now. Does nothing once :meth:`close` was called."""
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
        """End the start: leave the terminal's line to what is printed next."""
        if self._is_terminal and self._phases and not self._is_over:
            self._out.write(_CLEAR_LINE)
            self._out.flush()
        self._is_over = True

    def _line(self, text: str) -> None:
        self._out.write(f"  {text}\n")
        self._out.flush()


def described(phase: Phase) -> str:
    """Return a phase with how far it is: ``loading weights, 120 of 290 tensors``."""
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
