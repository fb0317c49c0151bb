"""Long work in several threads: one at a time runs Python code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class OneAtATime:
    """A lock around work; the work releases it while native code runs without the interpreter's lock."""

    def __init__(self) -> None:
        """Begin with no work in progress."""
        self._lock = threading.Lock()
        self._mine = threading.local()

    @property
    def is_held(self) -> bool:
        """Whether a thread is running Python code of its work now."""
        return self._lock.locked()

    def done(self, work: Callable[[], T]) -> T:
        """Run ``work`` once no other thread runs its own, and return its result."""
        with self._lock:
            self._mine.is_held = True
            try:
                return work()
            finally:
                self._mine.is_held = False

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        """Let another thread's work run during the block. Does nothing outside of :meth:`done`."""
        if not getattr(self._mine, "is_held", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
