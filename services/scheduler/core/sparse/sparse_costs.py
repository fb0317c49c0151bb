"""Costs of reading the important tokens of a prefix: a part of its bytes, layer by layer, on the critical path.

Each layer needs the keys of the probe heads, which are prefetched for several layers by one read, and then K and V of
the tokens that were chosen. Where the probe heads disagree it reads all keys, and then V alone (IMPRESS 4.3). Nothing
hides these reads, because a layer cannot begin before it has them. Keys and chosen tokens are two parts, each with a
pace: the time that its reads should have taken by the disk's rate over the time for which computation waited for them,
with calls, verification and blocks read in vain. So a disk that turns out faster or slower for whole chunks is so for
these reads as well, and a part that is predicted wrongly shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.scheduler.core.rates import disk_bytes_per_us, loaded_token_us
from shared.importance import PROBE_HEADS
from shared.messages.sparse_reads import MOST_LAYERS, code_bytes

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import KvGeometry
    from shared.messages.requests import Importance

FALLBACK_SHARE = 0.25
"""Share of layers in which the probe heads are expected to disagree."""

CALL_US = 500.0
"""Microseconds of a call to the storage and back, without the reads."""


@dataclass(frozen=True, slots=True)
class ReadPrice:
    """Costs of one part of a sparse read: microseconds of its calls, and bytes and microseconds of each token.

    Tokens are those of the prefix, chosen or not. ``copied_us`` is the copy of what a token brings to the device.
    """

    calls_us: float
    token_bytes: float
    token_us: float
    copied_us: float = 0.0
    pace: float = 1.0

    def expecting(self, tokens: int) -> float:
        """Return the microseconds of reading for a prefix of ``tokens``, by the disk's rate."""
        return self.calls_us + tokens * (self.token_us + self.copied_us)

    def reading(self, tokens: int) -> float:
        """Return the same by the observed pace."""
        return self.expecting(tokens) / self.pace


@dataclass(frozen=True, slots=True)
class SparsePrices:
    """Costs of sparse reads: of the keys that layers choose by, and of what they chose."""

    ratio: float
    keys: ReadPrice
    chosen: ReadPrice

    def reading(self, tokens: int) -> float:
        """Return the microseconds of reading a prefix of ``tokens`` sparsely, by the observed paces."""
        return self.keys.reading(tokens) + self.chosen.reading(tokens)

    @property
    def is_slow(self) -> bool:
        """Whether a part was observed to be slower than the disk's rate says."""
        return min(self.keys.pace, self.chosen.pace) < 1.0

    def unobserved(self) -> SparsePrices:
        """Return the costs without any observed pace."""
        return replace(self, keys=replace(self.keys, pace=1.0), chosen=replace(self.chosen, pace=1.0))


def sparse_prices(state: CellState, worker: Worker, storage: Storage, importance: Importance) -> SparsePrices | None:
    """Return the present costs of sparse reads; None while no geometry is known. Changes nothing."""
    geometry = state.geometry
    if geometry is None:
        return None
    rate, sparse = disk_bytes_per_us(storage), storage.sparse
    of_keys, of_chosen = shares_of_bytes(geometry, importance.ratio, importance.probe_heads)
    keys, chosen = geometry.token_bytes * of_keys, geometry.token_bytes * of_chosen
    return SparsePrices(
        ratio=importance.ratio,
        keys=ReadPrice(
            -(-geometry.layers // MOST_LAYERS) * CALL_US, keys, keys / rate, 0.0, sparse.keys_pace.per_us(1)
        ),
        chosen=ReadPrice(
            geometry.layers * CALL_US,
            chosen,
            chosen / rate,
            importance.ratio * loaded_token_us(state, worker),
            sparse.pace.per_us(1),
        ),
    )


def shares_of_bytes(geometry: KvGeometry, ratio: float, probe_heads: int) -> tuple[float, float]:
    """Return the expected bytes that a sparse read reads of keys, and of chosen tokens, over those of the KV. Pure.

    Keys are codes of the probe heads, or whole keys of more heads than copies have apart, and on a fallback all keys;
    there is no fallback with a single probe head.
    """
    probes = max(1, min(probe_heads, geometry.kv_heads))
    width = code_bytes(geometry.head_dim) if probes <= PROBE_HEADS else geometry.head_bytes
    of_probes = probes * width / (2 * geometry.kv_heads * geometry.head_bytes)
    fallback = FALLBACK_SHARE if probes > 1 else 0.0
    return of_probes + fallback / 2, (1 - fallback / 2) * ratio
