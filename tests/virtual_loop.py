"""An event loop whose time passes only when everybody waits for it, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    """Looks at what is ready now; where nothing is, the clock is put forward by the time that it was to wait."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.passed_s += max(0.0, timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for threads without a ``timeout``, which passes at once here: since Python 3.12 the runner has one."""
        await super().shutdown_default_executor()


def run_virtually(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end, of which nothing may wait for threads or sockets; the loop's time begins at 0 s."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
