"""The one table of versions of formats that outlive a process or pass between processes of different releases.

``major.minor``, each format on its own. A minor version adds: older bytes are still read, with the same meaning. A
major version breaks that. ``docs/reference/compatibility.md`` has the rules; ``tests/compatibility`` holds bytes of
every release and compares what they decode to now with what they did then.

Formats carry their major version in their bytes and refuse another; messages carry none, because every reader takes
fields that it does not know and fields that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Format:
    """One format; ``what`` names the bytes that have it."""

    name: str
    major: int
    minor: int
    what: str

    @property
    def version(self) -> str:
        """Version as text, ``major.minor``."""
        return f"{self.major}.{self.minor}"


WIRE = Format("wire", 1, 2, "messages over NATS, and inputs and outputs in its streams")
CHUNK = Format("chunk", 2, 0, "chunks of KV and of hidden states on disks and in object stores")
SPARSE = Format("sparse", 2, 1, "copies of chunks on disks that can be read in parts")
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
