"""Copies of a neighbour's device pages to this worker's, through the same thread and gate as host loads."""

from __future__ import annotations

from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.neighbours import Neighbour, Neighbours
from services.worker.kv.page_order import OrderPages
from shared.errors import TransportError
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import PageLoad


class NeighbourCopy:
    """Satisfies :class:`~services.worker.kv.page_order.PageCopy`."""

    def __init__(self, order: PageLoad, device_pages: int) -> None:
        """Unpack the lists of ``order``; this worker's own pool has ``device_pages`` pages."""
        self.pages = OrderPages(order)
        self._worker_id = order.neighbour_id
        self._incarnation = order.neighbour_incarnation
        self._device_pages = device_pages
        self._neighbour: Neighbour | None = None

    def open(self, neighbours: Neighbours) -> None:
        """Find the neighbour's pool and check the page numbers, before a byte moves."""
        try:
            neighbour = neighbours.find(self._worker_id, self._incarnation)
        except TransportError as error:
            self.pages.refuse(error.message)
            return
        if self.pages.check_bounds(neighbour.pages, self._device_pages):
            self._neighbour = neighbour

    @property
    def is_open(self) -> bool:
        """Whether the neighbour's pool is mapped and the order sound."""
        return self._neighbour is not None

    def copy(self, mover: PageMover, layer: int, start: int, count: int) -> None:
        """Copy pages from device to device; see :class:`~services.worker.kv.page_order.PageCopy`."""
        assert self._neighbour is not None
        todo = self.pages.usable(start, count)
        source, device = self.pages.source[todo], self.pages.device[todo]
        self._neighbour.load(mover, layer, source, device)

    def judge(self, layer: int) -> None:
        """Mark no page: a neighbour's pages have no checksums."""

    def confirm(self) -> None:
        """Mark no page: the scheduler has locked a neighbour's pages, so that they cannot change."""

    def failure(self) -> LoadFailure:
        """Return the report on wrong pages, which names the neighbour in the place of a storage."""
        return LoadFailure(
            storage_id="",
            host_pages=self.pages.wrong_pages,
            reason=self.pages.reason,
            neighbour_id=self._worker_id,
        )
