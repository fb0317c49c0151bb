"""The status of the whole cell, once or as a stream, for operators. The boundary has checked the admin key before."""

from __future__ import annotations

from fastapi import APIRouter, Response

from services.gateway.cache_calls import CacheCalls
from services.gateway.cell_events import CellEvents
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.cell import CellReport
from services.gateway.openapi import describes
from services.gateway.pending import Slots
from services.gateway.views.cell_view import cell_view

AT_ONCE = 8
"""Limit on concurrent calls to the scheduler."""

WATCHERS = 32
"""Limit on streams of events; they cost the scheduler nothing."""


def cell_router(gateway: Gateway) -> APIRouter:
    """Return the routes of the cell's status and its stream."""
    router = APIRouter(tags=["cell"])
    calls = CacheCalls(gateway.bus)
    slots, watchers = Slots(AT_ONCE), Slots(WATCHERS)

    @router.get(
        "/v1/cell",
        response_model=None,
        openapi_extra=describes(None, CellReport),
        summary="Workers, pools, queue and counters of the cell",
    )
    async def cell() -> Response:
        with slots.taken():
            status, now_ms = await calls.status(), gateway.wall_ns() // 1_000_000
            report = cell_view(status, gateway.callers.owners, models=gateway.model_names(), now_ms=now_ms)
        return json_response(report)

    @router.get(
        "/v1/cell/events",
        response_model=None,
        openapi_extra=describes(None, CellReport, streams=CellReport),
        summary="The cell's status about once a second, as server-sent events",
    )
    async def events() -> Response:
        return CellEvents(gateway, watchers)

    return router
