"""Signals that end the benchmark early, as an exception: what was found until then is kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Someone wants this process to end. Not an Exception: no handler of errors takes it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Within this block the first such signal raises :class:`Stopped`; later ones are ignored, as ending is bounded."""

    def stop(number: int, frame: object) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {each: signal.signal(each, stop) for each in STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
