"""Opening of directories that may hang: in a thread of its own, as long as it reports progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.errors import TransportError

Heard = Callable[[int], None]
"""Callback with the number of chunks found so far."""


def open_in_time(opening: Callable[[Heard], object], on_found: Heard, silence_s: float) -> bool:
    """Call ``opening`` with a callback for its progress; return False if it was silent for ``silence_s`` seconds.

    It goes on in its thread then, and its next call of the callback raises TransportError. Raises what ``opening``
    raises. Blocking.
    """
    heard_s = time.monotonic()
    is_late = False
    failures: list[BaseException] = []

    def heard(chunks: int) -> None:
        nonlocal heard_s
        if is_late:
            raise TransportError("it answered too late")
        heard_s = time.monotonic()
        on_found(chunks)

    def run() -> None:
        try:
            opening(heard)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="open directory", daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := heard_s + silence_s - time.monotonic()) > 0:
        thread.join(left_s)
    is_late = thread.is_alive()
    for failure in failures:
        raise failure
    return not is_late
