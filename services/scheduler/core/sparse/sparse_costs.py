"""Costs of reading the important tokens of a prefix: a part of its bytes, layer by layer, on the critical path.

Each layer needs the keys of the probe heads, which are prefetched for several layers by one read, and then K and V of
the tokens that were chosen. Where the probe heads disagree it reads all keys, and then V alone (IMPRESS 4.3). Nothing
hides these reads, because a layer cannot begin before it has them. Their observed time, with calls and blocks read in
vain, is kept as a pace: the time that they should have taken by the disk's rate over the time that they took. So a disk
that turns out faster or slower for whole chunks is so for these reads as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.scheduler.core.rates import disk_bytes_per_us, loaded_token_us
from shared.messages.sparse_reads import MOST_LAYERS

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import KvGeometry
    from shared.messages.requests import Importance

FALLBACK_SHARE = 0.25
"""Share of layers in which the probe heads are expected to disagree."""

CALL_US = 500.0
"""Microseconds of a call to the storage and back, without the reads."""


@dataclass(frozen=True, slots=True)
class SparsePrices:
    """Costs of sparse reads in microseconds; ``pace`` divides what follows from bytes and calls."""

    ratio: float
    calls_us: float  # Calls of all layers.
    token_us: float  # One token of the prefix, chosen or not, in all layers.
    pace: float = 1.0

    def expecting(self, tokens: int) -> float:
        """Return the microseconds of reading a prefix of ``tokens`` sparsely, by the disk's rate."""
        return self.calls_us + tokens * self.token_us

    def reading(self, tokens: int) -> float:
        """Return the same by the observed pace."""
        return self.expecting(tokens) / self.pace

    def unobserved(self) -> SparsePrices:
        """Return the costs without any observed pace."""
        return replace(self, pace=1.0)


def sparse_prices(state: CellState, worker: Worker, storage: Storage, importance: Importance) -> SparsePrices | None:
    """Return the present costs of sparse reads; None while no geometry is known. Changes nothing."""
    geometry = state.geometry
    if geometry is None:
        return None
    read_bytes = geometry.token_bytes * share_of_bytes(geometry, importance.ratio, importance.probe_heads)
    return SparsePrices(
        ratio=importance.ratio,
        # One for what each layer chose, and one for the keys of several.
        calls_us=(geometry.layers + -(-geometry.layers // MOST_LAYERS)) * CALL_US,
        token_us=read_bytes / disk_bytes_per_us(storage) + importance.ratio * loaded_token_us(state, worker),
        pace=storage.sparse.pace.per_us(1.0),
    )


def share_of_bytes(geometry: KvGeometry, ratio: float, probe_heads: int) -> float:
    """Return the expected share of the KV's bytes that a sparse read reads.

    Probe keys, chosen K and V, and all keys on a fallback; there is no fallback with a single probe head.
    """
    probes = max(1, min(probe_heads, geometry.kv_heads))
    agreed = probes / geometry.kv_heads / 2 + ratio
    fallen_back = (1.0 + ratio) / 2
    fallback = FALLBACK_SHARE if probes > 1 else 0.0
    return min(1.0, (1 - fallback) * agreed + fallback * fallen_back)
