"""A prefix that is to be kept: plain data of a snapshot (see :mod:`pins`)."""

from __future__ import annotations

import msgspec


class Pin(msgspec.Struct):
    """A prefix that is to be kept: a host lock on every node from the root to ``node`` at this storage.

    ``node`` is 0 while nothing of it is held. ``refusal`` says why nothing is and nothing will be.
    """

    pin_id: str
    storage_id: str
    namespace: str
    prefix: bytes  # Its tokens, packed.
    expires_ns: int
    timer_id: str
    node: int = 0
    pages: int = 0  # Host pages that it holds.
    chunks: bytes = b""  # What the storage was told to keep on its disk.
    refusal: str = ""
