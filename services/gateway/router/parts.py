"""The composed parts of one router, as its routes use them. Built by ``bootstrap``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.body import Bodies
from services.gateway.pending import RETRY_AFTER_MS, Slots
from services.gateway.router import metrics
from services.gateway.router.cells import STALE_S, Cells
from services.gateway.router.config import RouterConfig
from services.gateway.router.upstream import Upstream
from shared.errors import ThermoclineError, Unavailable


@dataclass(slots=True)
class Router:
    """All parts of one router.

    ``gateways`` are those of each cell. ``clock`` is monotonic, in seconds, and ``started_s`` its time at the start.
    """

    config: RouterConfig
    cells: Cells
    gateways: dict[str, list[Upstream]]
    slots: Slots
    bodies: Bodies
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(default_factory=time.monotonic)
    is_draining: bool = False
    running: dict[Callable[[ThermoclineError], None], None] = field(default_factory=dict)
    """Of each request in progress, what ends it with an error; a dictionary, since it keeps its order."""

    @property
    def default_model(self) -> str:
        """Name of the model that answers a request without one, by the first gateway that has told; else ""."""
        return next((each.model for gateways in self.gateways.values() for each in gateways if each.model), "")

    def summary_age_s(self, cell: str) -> float | None:
        """Return the time since a cell's last report of load, or since the start before the first.

        None where no report is expected.
        """
        if not self.config.summaries:
            return None
        state = self.cells.by_name[cell]
        return self.clock() - (self.started_s if state.load is None else state.load_s)

    def silence(self, cell: str) -> str:
        """Return a sentence on a cell that answers but reports no load, else ""."""
        age_s = self.summary_age_s(cell)
        if age_s is None or age_s <= STALE_S or not self.cells.by_name[cell].is_open:
            return ""
        return (
            f"its gateways have reported nothing for {age_s:.0f} s: look at their --cell and at its broker's leaf node"
        )

    def misnamed(self, cell: str) -> str:
        """Return what is wrong with the cell's name at one of its gateways, else ""."""
        return next((gateway.misnamed for gateway in self.gateways[cell] if gateway.misnamed), "")

    def check_open(self) -> None:
        """Raise Unavailable while requests cannot be accepted."""
        if self.is_draining:
            raise Unavailable("this router is shutting down", retry_after_ms=RETRY_AFTER_MS)

    def end_all(self) -> None:
        """End the requests in progress, since the router shuts down; their clients get the error."""
        for end in list(self.running):
            end(Unavailable("the router is shutting down", retry_after_ms=RETRY_AFTER_MS))

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
