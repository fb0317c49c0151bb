"""The hidden pools that this worker has mapped, by the storage that owns them.

Steps save hidden states into leased pages of them (HCache section 4.2.2), and restorations read them, so they are
mapped writable. On a GPU they are pinned, so that reads cross the link without staging.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.kv.mapped_pools import MappedPools, Pins
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry, PoolHandle


class HiddenPools(MappedPools):
    """Views of pools whose hidden pages restore KV of the worker's own geometry. Used by the compute thread."""

    def __init__(
        self,
        geometry: KvGeometry,
        pins: Pins | None = None,
        retire: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Prepare; ``geometry`` is that of the worker's KV.

        ``retire`` runs the unmapping of a pool behind all writes to it.
        """

        def fault(handle: PoolHandle) -> str:
            if handle.geometry.is_hidden and handle.geometry.as_kv == geometry:
                return ""
            return f"pool {handle.name} of {handle.geometry} holds no hidden states that {geometry} is restored from"

        super().__init__("hidden", fault, pins, retire, is_written=True)

    def view(self, storage_id: str) -> HostPoolView:
        """Return a mapped pool. Raises TransportError, with the reason, when there is none."""
        return self.find(storage_id).view

    def is_pinned(self, storage_id: str) -> bool:
        """Return whether a GPU may read that pool by itself."""
        pool = self._pools.get(storage_id)
        return pool is not None and pool.is_pinned
