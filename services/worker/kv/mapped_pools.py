"""Pools of storages that this worker has mapped, by the storage that owns them: mapping, pinning, unmapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.kv.page_memory import PageLayout, PageMemory
from shared import logs
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import PoolHandle

_log = logs.get_logger("worker")


class Pins(Protocol):
    """Registration of mapped memory with the GPU's driver; see :mod:`services.worker.kv.pinning`."""

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` behind earlier work; serving does not wait for it."""

    def finish(self) -> None:
        """Return when all started work is done."""

    def pin(self, array: npt.NDArray[np.uint8]) -> None:
        """Register the memory under ``array``. Raises TransportError when the driver refuses."""

    def unpin(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo :meth:`pin`; the caller makes sure that nothing reads or writes the memory any more."""


@dataclass(slots=True, eq=False)
class AttachedPool:
    """A mapped pool. ``is_pinned``, set some time after it was attached: a GPU may read it by itself."""

    view: HostPoolView
    is_pinned: bool = False

    def memory(self) -> PageMemory:
        """Return its pages, for a mover. Raises TransportError when the pool has been unmapped meanwhile."""
        layout = PageLayout.page_first(self.view.geometry, self.view.handle.pages)
        return PageMemory(layout, array=self.view.flat_pages(), is_pinned=self.is_pinned)


class MappedPools:
    """One pool of each storage: host pools or hidden pools."""

    def __init__(
        self,
        kind: str,
        fault: Callable[[PoolHandle], str],
        pins: Pins | None,
        retire: Callable[[Callable[[], None]], object],
        *,
        is_written: bool,
    ) -> None:
        """Prepare; ``kind`` is for errors and the log.

        ``fault`` returns why this worker has no use for a pool, or "". ``retire`` runs the release of a detached pool
        behind all that still uses it; a pool that ``is_written`` is always released that way, others when they are
        pinned.
        """
        self._kind, self._fault, self._is_written = kind, fault, is_written
        self._pins = pins
        self._retire = retire
        self._pools: dict[str, AttachedPool] = {}
        self._reasons: dict[str, str] = {}  # Why a pool could not be mapped, by storage.
        self._unpinned: dict[str, str] = {}  # Why a mapped pool is not pinned, by storage.

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a pool, replacing an older one of that storage. If it cannot be mapped, :meth:`find` raises later."""
        self.detach(storage_id)
        try:
            fault = self._fault(handle)
            if fault:
                raise TransportError(fault)
            # The driver registers only memory that this process may write.
            view = HostPoolView.attach(handle, writable=self._is_written or self._pins is not None)
        except TransportError as error:
            self._reasons[storage_id] = error.message
            _log.warning(f"{self._kind}_pool_not_attached", storage=storage_id, reason=error.message)
            return
        pool = self._pools[storage_id] = AttachedPool(view)
        if self._pins is not None:
            self._pins.start(lambda: self._pin(storage_id, pool))

    def detach(self, storage_id: str) -> None:
        """Unmap a pool; an unknown one is ignored."""
        self._reasons.pop(storage_id, None)
        self._unpinned.pop(storage_id, None)
        pool = self._pools.pop(storage_id, None)
        if pool is not None and self._pins is not None:
            pins = self._pins
            # Behind all that uses the pool, and behind its pinning.
            self._retire(lambda: pins.start(lambda: self._close(pool)))
        elif pool is not None and self._is_written:
            self._retire(lambda: self._close(pool))
        elif pool is not None:
            self._close(pool)

    def find(self, storage_id: str) -> AttachedPool:
        """Return a mapped pool. Raises TransportError, with the reason, when there is none."""
        pool = self._pools.get(storage_id)
        if pool is None:
            raise TransportError(self._reasons.get(storage_id, f"no {self._kind} pool of {storage_id} is attached"))
        return pool

    def faults(self) -> list[tuple[str, str]]:
        """Return each pool that is not mapped, or mapped and not pinned, with the reason. Safe from any thread."""
        return [
            *(
                (f"{self._kind} pool", f"that of {name} is not mapped: {why}")
                for name, why in list(self._reasons.items())
            ),
            *(
                (f"{self._kind} pool", f"that of {name} is not pinned: {why}")
                for name, why in list(self._unpinned.items())
            ),
        ]

    def close(self) -> None:
        """Unmap all pools at once; nothing uses them any more."""
        if self._pins is not None:
            self._pins.finish()
        while self._pools:
            self._close(self._pools.popitem()[1])

    def _pin(self, storage_id: str, pool: AttachedPool) -> None:
        """Pin a pool, on the thread of ``pins``; until this is done movers stage the pool's rows."""
        assert self._pins is not None
        if self._pools.get(storage_id) is not pool:
            return  # It was detached meanwhile.
        try:
            self._pins.pin(pool.view.flat_pages())
        except TransportError as error:
            self._unpinned[storage_id] = error.message
            _log.warning(f"{self._kind}_pool_not_pinned", storage=storage_id, reason=error.message)
            return
        pool.is_pinned = True
        _log.info(f"{self._kind}_pool_pinned", storage=storage_id, nbytes=pool.view.flat_pages().nbytes)

    def _close(self, pool: AttachedPool) -> None:
        if pool.is_pinned and self._pins is not None:
            self._pins.unpin(pool.view.flat_pages())
        pool.view.close()
