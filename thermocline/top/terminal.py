"""Single key presses of a terminal, whose mode is restored at the end."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_NAMED = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[5~": "page up",
    b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[Z": "back", b"\t": "tab", b" ": "space",
    b"k": "up", b"j": "down", b"g": "home", b"G": "end",
}  # fmt: skip
_READ_BYTES = 256
WAITING_KEYS = 64


def keys_in(data: bytes) -> list[str]:
    """Return the names of keys in a terminal's input; an unknown escape sequence ends the list."""
    found: list[str] = []
    while data:
        if data[:1] == b"\x1b":
            sequence = next((known for known in _NAMED if len(known) > 1 and data.startswith(known)), None)
            if sequence is None:
                # The rest of the read may belong to the unknown sequence.
                return found
            found.append(_NAMED[sequence])
            data = data[len(sequence) :]
            continue
        found.append(_NAMED.get(data[:1], data[:1].decode("ascii", "replace")))
        data = data[1:]
    return found


@contextmanager
def pressed_keys(fd: int) -> Iterator[asyncio.Queue[str]]:
    """Yield a queue of up to WAITING_KEYS keys; more are dropped. The end of the input is the key ``q``."""
    keys: asyncio.Queue[str] = asyncio.Queue(WAITING_KEYS)
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(fd, _READ_BYTES)
        if not data:
            loop.remove_reader(fd)
        for key in keys_in(data) or ([] if data else ["q"]):
            if not keys.full():
                keys.put_nowait(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield keys
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
