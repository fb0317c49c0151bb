"""The composed parts of one router, as its routes use them. Built by ``bootstrap``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.body import Bodies
from services.gateway.pending import RETRY_AFTER_MS, Slots
from services.gateway.router import metrics
from services.gateway.router.cells import Cells
from services.gateway.router.config import RouterConfig
from services.gateway.router.upstream import Upstream
from shared.errors import Unavailable


@dataclass(slots=True)
class Router:
    """All parts of one router. ``gateways`` are those of each cell. ``clock`` is monotonic, in seconds."""

    config: RouterConfig
    cells: Cells
    gateways: dict[str, list[Upstream]]
    slots: Slots
    bodies: Bodies
    clock: Callable[[], float] = time.monotonic
    is_draining: bool = False

    def check_open(self) -> None:
        """Raise Unavailable while requests cannot be accepted."""
        if self.is_draining:
            raise Unavailable("this router is shutting down", retry_after_ms=RETRY_AFTER_MS)

    def reached(self, cell: str, gateway: Upstream) -> None:
        """Mark the gateway as ready."""
        gateway.failures = 0
        gateway.lost.clear()
        gateway.is_open, gateway.error = True, ""
        self._note(cell)

    def not_ready(self, cell: str, gateway: Upstream, status: int) -> None:
        """Mark the gateway as answering without accepting requests; its requests in progress continue."""
        gateway.failures = 0
        gateway.is_open, gateway.error = False, f"{gateway.url} is not ready: it answers {status}"
        self._note(cell)

    def lost(self, cell: str, gateway: Upstream, error: str) -> None:
        """Mark the gateway as lost, for this reason: requests that wait there for a first byte are tried elsewhere."""
        gateway.is_open, gateway.error = False, error
        gateway.lost.set()
        self._note(cell)

    def open_gateways(self, cell: str) -> list[Upstream]:
        """Return the cell's gateways that answer, the one with the fewest of this router's requests first."""
        return sorted((each for each in self.gateways[cell] if each.is_open), key=lambda each: each.in_flight)

    def _note(self, cell: str) -> None:
        is_open = any(gateway.is_open for gateway in self.gateways[cell])
        if is_open:
            self.cells.opened(cell)
        else:
            self.cells.closed(cell)
        metrics.CELL_UP.labels(cell).set(is_open)
