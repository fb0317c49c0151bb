"""The host pools that this worker has mapped: loads read them, and nothing is ever written to them."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.kv.mapped_pools import AttachedPool, MappedPools, Pins
from shared.messages.pools import KvGeometry, PoolHandle

__all__ = ["AttachedPool", "HostPools", "Pins"]


class HostPools(MappedPools):
    """Views of host pools with the worker's own geometry."""

    def __init__(
        self,
        geometry: KvGeometry,
        pins: Pins | None = None,
        retire: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Prepare; ``retire`` runs the unpinning of a detached pool after all that still reads it."""

        def fault(handle: PoolHandle) -> str:
            if handle.geometry == geometry:
                return ""
            return f"host pool {handle.name} has geometry {handle.geometry}, not {geometry}"

        super().__init__("host", fault, pins, retire, is_written=False)
