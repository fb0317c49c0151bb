"""Bytes read of a prefix, by purpose: the figure that importance-informed loading reduces."""

from __future__ import annotations

from enum import Enum


class ReadKind(Enum):
    """The purpose of a read."""

    PROBE_KEYS = "probe_keys"
    CHOSEN = "chosen"  # K and V of important tokens.
    FALLBACK_KEYS = "fallback_keys"  # Keys of all heads, where the probe heads disagreed.
    FALLBACK_VALUES = "fallback_values"  # V of what each head chose then.


class BytesRead:
    """Counts of bytes, one for each kind of read."""

    def __init__(self) -> None:
        """Begin with 0 bytes of each kind."""
        self._counts = dict.fromkeys(ReadKind, 0)

    def add(self, kind: ReadKind, nbytes: int) -> None:
        """Count ``nbytes`` more of a kind."""
        self._counts[kind] += nbytes

    def __getitem__(self, kind: ReadKind) -> int:
        """Return the bytes of one kind."""
        return self._counts[kind]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self._counts.values())

    def by_kind(self) -> dict[str, int]:
        """Return all counts by name, in the order of :class:`ReadKind`."""
        return {kind.value: count for kind, count in self._counts.items()}
