"""Long work in several threads; one at a time runs Python's code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class OneAtATime:
    """A lock around work, which the work lets go of while native code runs without the interpreter's lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()

    @property
    def is_held(self) -> bool:
        """Whether a thread is at its work now, in Python's code."""
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
        """Let another thread go on during the block. Changes nothing for one that is not within :meth:`done`."""
        if not getattr(self._mine, "is_held", False):
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
