"""Make an input smaller as long as the same thing goes wrong with it."""

from __future__ import annotations

from collections.abc import Callable

MOST_TRIES = 3000


def shrink(data: bytes, still_fails: Callable[[bytes], bool], *, tries: int = MOST_TRIES) -> bytes:
    """The smallest input found within ``tries``: pieces are cut out, large ones first, then bytes become zeros."""
    size = max(1, len(data) // 2)
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            shorter = data[:at] + data[at + size :]
            tries -= 1
            if still_fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    for at in range(min(len(data), tries)):
        zeroed = data[:at] + b"\0" + data[at + 1 :]
        if data[at] and still_fails(zeroed):
            data = zeroed
    return data
