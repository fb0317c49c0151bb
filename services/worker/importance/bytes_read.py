"""Bytes read of a prefix, by what for: the figure that importance-informed loading is about."""

from __future__ import annotations

from enum import Enum


class ReadKind(Enum):
    """Why something was read."""

    PROBE_KEYS = "probe_keys"
    ON_DEMAND = "on_demand"  # K and V of important tokens that were not there yet.
    SPECULATIVE = "speculative"  # K and V read ahead, whether they were needed or not.
    FALLBACK_KEYS = "fallback_keys"  # Keys of all other heads, where the probe heads disagreed.
    FALLBACK_VALUES = "fallback_values"  # V of what each head chose then and was not there yet.


class BytesRead:
    """One count for each kind."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(ReadKind, 0)

    def add(self, kind: ReadKind, nbytes: int) -> None:
        self._counts[kind] += nbytes

    def __getitem__(self, kind: ReadKind) -> int:
        return self._counts[kind]

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def by_kind(self) -> dict[str, int]:
        """All counts by name, in the order of :class:`ReadKind`."""
        return {kind.value: count for kind, count in self._counts.items()}
