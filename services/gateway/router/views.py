"""Reports of a router on itself and its cells."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai_schema.errors import ErrorDetail, error_detail
from services.gateway.router.parts import Router
from shared.errors import Unavailable


class RouterHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a router.

    ``status`` is ``ready``; ``degraded`` when some cell is away, has another model, or is called otherwise by its
    gateways; or ``not_ready``. ``cells_open`` counts the cells that get requests.
    """

    status: str
    cells: int
    cells_open: int
    error: ErrorDetail | UnsetType = UNSET


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway; ``error`` says why it is not open, or that it gives its cell another name."""

    url: str
    is_open: bool
    in_flight: int
    error: str = ""


class CellRouting(msgspec.Struct, frozen=True, kw_only=True):
    """One cell as the router sees it.

    ``summary_age_s`` is null without a report of its load. ``error`` says why an open cell gets no requests, that its
    gateways give it another name, or that it reports nothing.
    """

    name: str
    is_open: bool
    gateways: list[GatewayReport]
    in_flight: int
    heads: int
    workers: int = 0
    running: int = 0
    queued: int = 0
    models: tuple[str, ...] = ()
    summary_age_s: float | None = None
    error: str = ""


class CellList(msgspec.Struct, frozen=True, kw_only=True):
    """All cells of the router."""

    object: str = "list"
    data: list[CellRouting]


def health_view(router: Router) -> RouterHealth:
    """Return whether a request would be answered now. Names and addresses are left out: they need the admin key."""
    states, odd = router.cells.by_name.values(), router.cells.other_models
    cells, cells_open = len(states), sum(cell.is_open and cell.name not in odd for cell in states)
    if router.is_draining or not cells_open:
        why = "the router is shutting down" if router.is_draining else "no cell answers"
        error = error_detail(Unavailable(f"not ready: {why}"))
        return RouterHealth(status="not_ready", cells=cells, cells_open=cells_open, error=error)
    is_well = cells == cells_open and not any(router.misnamed(cell.name) for cell in states)
    return RouterHealth(status="ready" if is_well else "degraded", cells=cells, cells_open=cells_open)


def cells_view(router: Router) -> CellList:
    """Return every cell with its gateways, load and heads."""
    now_s, odd = router.clock(), router.cells.other_models
    return CellList(
        data=[
            CellRouting(
                name=cell.name,
                is_open=cell.is_open,
                gateways=[
                    GatewayReport(
                        url=gateway.url,
                        is_open=gateway.is_open,
                        in_flight=gateway.in_flight,
                        error=gateway.error or gateway.misnamed,
                    )
                    for gateway in router.gateways[cell.name]
                ],
                in_flight=cell.own,
                heads=router.cells.index.count(cell.name),
                workers=cell.load.workers if cell.load else 0,
                running=cell.load.running if cell.load else 0,
                queued=cell.load.queued if cell.load else 0,
                models=cell.load.models if cell.load else (),
                summary_age_s=round(now_s - cell.load_s, 3) if cell.load else None,
                error=odd.get(cell.name) or router.misnamed(cell.name) or router.silence(cell.name),
            )
            for cell in router.cells.by_name.values()
        ]
    )
