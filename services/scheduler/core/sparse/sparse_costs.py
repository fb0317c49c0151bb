"""What reading the important tokens of a prefix costs: a part of its bytes, layer after layer, on the critical path.

Each layer first reads the keys of the probe heads, then K and V of the tokens that were chosen. Where the probe heads
disagree it reads all keys, and then V alone (IMPRESS 4.3). Nothing hides these reads, because a layer cannot begin
before it has them. What is seen of them, calls and blocks read in vain included, is kept as a pace: the time that they
should have taken by the disk's rate over the time that they took. So a disk that turns out faster or slower for whole
chunks is so for these reads as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.scheduler.core.rates import disk_bytes_per_us, loaded_token_us

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import KvGeometry
    from shared.messages.requests import Importance

FALLBACK_SHARE = 0.25
"""Layers in which the probe heads are expected to disagree, of all."""

CALL_US = 500.0
"""A call to the storage and back, without the reads."""

_CALLS = 2  # Of each layer.


@dataclass(frozen=True, slots=True)
class SparsePrices:
    """Times in microseconds. ``pace`` divides what follows from bytes and calls."""

    ratio: float
    calls_us: float  # Of all layers.
    token_us: float  # Of one token of the prefix, chosen or not, in all layers.
    pace: float = 1.0

    def expecting(self, tokens: int) -> float:
        """Return the time of reading what is important of so many tokens, by the disk's rate."""
        return self.calls_us + tokens * self.token_us

    def reading(self, tokens: int) -> float:
        """Return the same by observation."""
        return self.expecting(tokens) / self.pace

    def unobserved(self) -> SparsePrices:
        """As if nothing had been seen of such reads."""
        return replace(self, pace=1.0)


def sparse_prices(state: CellState, worker: Worker, storage: Storage, importance: Importance) -> SparsePrices | None:
    """Return what such reads cost now; None while no geometry is known. Does not mutate."""
    geometry = state.geometry
    if geometry is None:
        return None
    read_bytes = geometry.token_bytes * share_of_bytes(geometry, importance.ratio, importance.probe_heads)
    return SparsePrices(
        ratio=importance.ratio,
        calls_us=geometry.layers * _CALLS * CALL_US,
        token_us=read_bytes / disk_bytes_per_us(storage) + importance.ratio * loaded_token_us(state, worker),
        pace=storage.sparse.pace.per_us(1.0),
    )


def share_of_bytes(geometry: KvGeometry, ratio: float, probe_heads: int) -> float:
    """Return expected bytes that are read over those of the whole KV: probe keys, chosen K and V, and keys on a
    fallback, which there is none of where one head is asked.
    """
    probes = max(1, min(probe_heads, geometry.kv_heads))
    agreed = probes / geometry.kv_heads / 2 + ratio
    fallen_back = (1.0 + ratio) / 2
    fallback = FALLBACK_SHARE if probes > 1 else 0.0
    return min(1.0, (1 - fallback) * agreed + fallback * fallen_back)
