"""Pages of a neighbour's device pool to pages of ours, through the same thread and gate as host loads."""

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
        self.pages = OrderPages(order)
        self._worker_id = order.neighbour_id
        self._incarnation = order.neighbour_incarnation
        self._device_pages = device_pages
        self._neighbour: Neighbour | None = None

    def open(self, neighbours: Neighbours) -> None:
        """Check everything that can be checked before a byte moves."""
        try:
            neighbour = neighbours.find(self._worker_id, self._incarnation)
        except TransportError as error:
            self.pages.refuse(error.message)
            return
        if self.pages.check_bounds(neighbour.pages, self._device_pages):
            self._neighbour = neighbour

    @property
    def is_open(self) -> bool:
        return self._neighbour is not None

    def copy(self, mover: PageMover, layer: int, start: int, count: int) -> None:
        """See :class:`~services.worker.kv.page_order.PageCopy`."""
        assert self._neighbour is not None
        todo = self.pages.usable(start, count)
        source, device = self.pages.source[todo], self.pages.device[todo]
        self._neighbour.load(mover, layer, source, device)

    def judge(self, layer: int) -> None:
        """Nothing is wrong: a neighbour's pages have no checksums."""

    def confirm(self) -> None:
        """Nothing tells of a neighbour's page that it has changed: the scheduler has locked it."""

    def failure(self) -> LoadFailure:
        return LoadFailure(
            storage_id="",
            host_pages=self.pages.wrong_pages,
            reason=self.pages.reason,
            neighbour_id=self._worker_id,
        )
