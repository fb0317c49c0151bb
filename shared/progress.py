"""Progress of a process until it is ready, reported to the supervisor that started it and to its own log.

A supervisor hands each process one end of a pipe, whose number is in ``THERMOCLINE_PROGRESS_FD``. Phases are lines of
JSON there. The process never waits for the pipe: lines that do not fit are dropped, and without a pipe only the log
gets them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from shared import logs

VARIABLE = "THERMOCLINE_PROGRESS_FD"

TOLD_EVERY_S = 0.25
"""Least seconds between two reports of progress within a phase."""

MOST_LINE_BYTES = 1024

_log = logs.get_logger("progress")


class Phase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A phase of a process. ``name`` says what goes on, such as ``loading weights``; "": the process is ready.

    ``done`` of ``total`` are counted in ``unit``; a total of 0 is not known.
    """

    name: str
    done: int = 0
    total: int = 0
    unit: str = ""


READY = Phase(name="")


class Reporter:
    """A reporter of phases as they come; any thread may use it."""

    def __init__(self, write: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Report by ``write``, which gets a line of JSON and must neither wait nor raise.

        ``clock`` is monotonic, in seconds.
        """
        self._write = write
        self._clock = clock
        self._is_ready = False

    @contextmanager
    def phase(self, name: str, *, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Report a phase while the block runs, which calls what it gets with the amount done since its last call."""
        done, told_s = 0, self._clock()

        def advance(amount: int = 1) -> None:
            nonlocal done, told_s
            done += amount
            now = self._clock()
            if now - told_s >= TOLD_EVERY_S:
                told_s = now
                self.tell(Phase(name=name, done=done, total=total, unit=unit))

        self.tell(Phase(name=name, total=total, unit=unit))
        started_s = told_s
        yield advance
        if logs.is_of_service():
            _log.info("phase_ended", phase=name, seconds=round(self._clock() - started_s, 3))
        if self._is_ready:
            self.tell(READY)

    def tell(self, phase: Phase) -> None:
        """Report a phase. Once READY was reported, it is reported again after each later phase."""
        self._is_ready = self._is_ready or phase == READY
        self._write(msgspec.json.encode(phase) + b"\n")


def parse(line: bytes) -> Phase | None:
    """Return the phase in one line of a process; None for any other line."""
    try:
        return msgspec.json.decode(line, type=Phase)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@contextmanager
def phase(name: str, *, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Report a phase of this process while the block runs; see :meth:`Reporter.phase`."""
    with _reporter().phase(name, total=total, unit=unit) as advance:
        yield advance


def ready() -> None:
    """Report that this process is ready."""
    _reporter().tell(READY)


_made: Reporter | None = None
_making = threading.Lock()


def _reporter() -> Reporter:
    global _made
    with _making:
        if _made is None:
            _made = Reporter(_pipe())
        return _made


def _pipe() -> Callable[[bytes], object]:
    """Return a writer to the supervisor's pipe that never waits. Processes that this one starts do not inherit it."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdigit():
        return lambda line: None
    descriptor = int(number)
    try:
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
    except OSError:
        return lambda line: None

    def write(line: bytes) -> None:
        try:
            os.write(descriptor, line)
        except OSError:
            pass  # The pipe is full, or the supervisor gone.

    return write
