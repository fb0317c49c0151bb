"""Progress of a command on stderr: after two seconds, on a terminal, and removed before the result is printed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

AFTER_S = 2.0
"""Seconds before the line is shown; shorter work shows nothing."""


class Bar:
    """One line of progress. Threads may call its methods."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Wrap ``task`` of ``progress``, which is started and stopped elsewhere."""
        self._progress = progress
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """Count ``amount`` more as done."""
        self._progress.advance(self._task, amount)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the amount done, and the total where it is known."""
        self._progress.update(self._task, completed=done, total=total)

    def say(self, text: str) -> None:
        """Replace the text of the line."""
        self._progress.update(self._task, description=text)


@contextmanager
def shown(text: str, total: int | None = None, *, after_s: float = AFTER_S) -> Iterator[Bar]:
    """Show ``text``, the amount done of ``total`` and the time since, while the block runs.

    The block must not print: the line is on the terminal then, and is removed at the end.
    """
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f}")]
    console = Console(stderr=True)
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    bar = Bar(progress, progress.add_task(text, total=total))
    if not sys.stderr.isatty():
        yield bar
        return
    timer = threading.Timer(after_s, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
