"""Opening what may hang: in a thread of its own, for as long as something is heard of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.errors import TransportError

Heard = Callable[[int], None]
"""Told of chunks as they are found, by their number."""


def open_in_time(opening: Callable[[Heard], object], on_found: Heard, silence_s: float) -> bool:
    """Call ``opening`` with what it must tell of progress; False if it was silent for ``silence_s`` seconds.

    It goes on in its thread then, and gets TransportError the next time that it tells of something. Raises what it
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
