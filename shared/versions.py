"""Versions of what outlives a process or passes between two of different releases: the one table.

``major.minor``, each format on its own. A minor version adds: what was written before is still read, and means what it
meant. A major version breaks that. ``docs/reference/compatibility.md`` has the rules; ``tests/compatibility`` holds
bytes of every release and compares what they say now with what they said then.

Formats carry their major version in their bytes and refuse another; messages carry none, because every reader takes
fields that it does not know and fields that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Format:
    """One format; ``what`` says where it is met."""

    name: str
    major: int
    minor: int
    what: str

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}"


WIRE = Format("wire", 1, 2, "messages over NATS, and inputs and outputs in its streams")
CHUNK = Format("chunk", 2, 0, "chunks of KV and of hidden states on disks and in object stores")
SPARSE = Format("sparse", 2, 0, "copies of chunks on disks that can be read in parts")
SNAPSHOT = Format("snapshot", 1, 1, "objects in the broker's bucket that hold the scheduler's state")
STATE = Format("state", 14, 0, "the scheduler's state within a snapshot")
RECORDING = Format("recording", 1, 2, "files of thermocline record")

FORMATS = (WIRE, CHUNK, SPARSE, SNAPSHOT, STATE, RECORDING)


def release() -> str:
    """Return the version of this release, or "" where the code runs without being installed."""
    try:
        return metadata.version("thermocline")
    except metadata.PackageNotFoundError:
        return ""
