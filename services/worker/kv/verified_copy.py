"""Verified copies of host pages to device pages, for a load on demand and a promotion ahead of demand.

The identity of every page is compared with the plan's, and each layer's checksum, seeded with that identity, for the
pages that ``Verification`` draws (all of them by default). Some movers check a row before they write it, some after
(``Verdict``). Either way a page that fails is marked before its layer is declared loaded, and the contents of its
device page are void then: the scheduler undoes the load, or the promotion, as a whole, and reuses all its pages.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from services.worker.kv.host_pools import AttachedPool, HostPools
from services.worker.kv.movers.protocol import PageMover, Verdict
from services.worker.kv.page_order import OrderPages
from services.worker.kv.row_checks import RowChecks
from services.worker.kv.verification import Verification
from shared.errors import TransportError
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import PageLoad, PromotePages


class VerifiedCopy:
    """Satisfies :class:`~services.worker.kv.page_order.PageCopy` for pages of a host pool."""

    def __init__(self, order: PageLoad | PromotePages, device_pages: int, verification: Verification) -> None:
        """Unpack the lists of ``order``, and have ``verification`` draw the pages to check.

        This worker's own pool has ``device_pages`` pages.
        """
        self.pages = OrderPages(order)
        self._storage_id = order.storage_id
        self._device_pages = device_pages
        self._verification = verification
        self._wanted = verification.draw(self.pages.identities)
        self._pool: AttachedPool | None = None
        # Launched pieces: the layer, the entries and their verdict.
        self._launched: deque[tuple[int, np.ndarray, Verdict]] = deque()

    def open(self, pools: HostPools) -> None:
        """Find the pool and check page numbers and identities, before a byte moves."""
        try:
            pool = pools.find(self._storage_id)
        except TransportError as error:
            self.pages.refuse(error.message)
            return
        if self.pages.check_bounds(pool.view.handle.pages, self._device_pages):
            self._pool = pool
            self._compare_identities()

    @property
    def is_open(self) -> bool:
        """Whether the host pool is mapped and the order sound."""
        return self._pool is not None

    def copy(self, mover: PageMover, layer: int, start: int, count: int) -> None:
        """Copy the usable pages and keep the mover's verdict; see :class:`~services.worker.kv.page_order.PageCopy`."""
        assert self._pool is not None
        assert count <= mover.piece_pages
        pages = self.pages
        todo = pages.usable(start, count)
        source = pages.source[todo]
        checks = self._checks(todo, layer)
        verdict = mover.load(self._pool.memory(), range(layer, layer + 1), source, pages.device[todo], checks)
        if checks is not None:
            self._launched.append((layer, todo, verdict))

    def judge(self, layer: int) -> None:
        """Mark pages by the verdicts on this layer and those before.

        See :class:`~services.worker.kv.page_order.PageCopy`.
        """
        while self._launched and self._launched[0][0] <= layer:
            of_layer, todo, verdict = self._launched.popleft()
            failed = verdict.wrong()
            if failed.any():
                wrong = np.zeros(len(self.pages), dtype=bool)
                wrong[todo[failed]] = True
                self.pages.mark(wrong, f"checksum of layer {of_layer}")
                self._verification.note_failure(self._storage_id)

    def confirm(self) -> None:
        """Mark pages that were reused during the copy: they have another identity by now, or none."""
        if self._pool is not None and not self._wanted.all():
            self._compare_identities()

    def failure(self) -> LoadFailure:
        """Return the report on wrong pages, which names the storage."""
        return LoadFailure(storage_id=self._storage_id, host_pages=self.pages.wrong_pages, reason=self.pages.reason)

    def _checks(self, todo: np.ndarray, layer: int) -> RowChecks | None:
        assert self._pool is not None
        if self._verification.distrusts(self._storage_id):
            self._wanted[:] = True
        wanted = self._wanted[todo]
        if not wanted.any():
            return None
        expected = self._pool.view.checksums[self.pages.source[todo], layer]
        return RowChecks(expected.reshape(-1, 1), self.pages.identities[todo], wanted)

    def _compare_identities(self) -> None:
        assert self._pool is not None
        held = self._pool.view.identities[self.pages.source]
        wrong = (held != self.pages.identities).any(axis=1)
        if wrong.any():
            self.pages.mark(wrong, "identity")
            self._verification.note_failure(self._storage_id)
