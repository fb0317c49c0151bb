"""What the core folds: one message of ``TC_INPUTS`` with its place and its time in the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.codec import Input


@dataclass(frozen=True, slots=True)
class Stamped:
    """An input as the stream stored it.

    ``seq`` is its sequence number there, which orders everything; ``time_ns`` is the server's timestamp (wall
    clock, ns), which is the only clock that the core knows.
    """

    seq: int
    time_ns: int
    input: Input
