"""The data of a frame, from a gateway. Every wait is bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import httpx
import msgspec

from services.gateway.openai_schema.cache import CacheNode, CacheNodes
from services.gateway.openai_schema.cell import CellReport
from services.gateway.openai_schema.errors import ErrorResponse
from services.gateway.openai_schema.explanation import Explanation, ExplanationList
from shared.errors import NotAuthenticated, ThermoclineError, TransportError, Unavailable
from thermocline.cache.gateway_client import GatewayRefused

REQUESTS = 100
PAGE_NODES = 1024
MOST_NODES = 4096
ASK_S = 5.0

Link = Literal["connecting", "live", "disconnected", "unauthorised", "scheduler away", "refused"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The latest data; old unless ``link`` is "live", with the reason in ``error``. At most about MOST_NODES nodes."""

    link: Link = "connecting"
    error: str = ""
    cell: CellReport | None = None
    requests: list[Explanation] = field(default_factory=list)
    nodes: list[CacheNode] = field(default_factory=list)
    has_more_nodes: bool = False


async def look(http: httpx.AsyncClient, before: Snapshot, *, with_nodes: bool) -> Snapshot:
    """Return new data, or on failure that of ``before`` with the error. Never raises ThermoclineError."""
    try:
        cell, requests = await asyncio.gather(
            _get(http, "/v1/cell", CellReport), _get(http, f"/v1/requests?limit={REQUESTS}", ExplanationList)
        )
        latest = sorted(requests.data, key=lambda request: -request.created_ms)
        now = Snapshot("live", "", cell, latest, before.nodes, before.has_more_nodes)
        return await _with_nodes(http, now) if with_nodes else now
    except ThermoclineError as error:
        return replace(before, link=_link_of(error), error=error.message)


async def _with_nodes(http: httpx.AsyncClient, snapshot: Snapshot) -> Snapshot:
    nodes: list[CacheNode] = []
    after: int | None = 0
    while after is not None and len(nodes) < MOST_NODES:
        page = await _get(http, f"/v1/cache?limit={PAGE_NODES}&after={after}", CacheNodes)
        nodes += page.data
        after = page.next_after
    return replace(snapshot, nodes=nodes, has_more_nodes=after is not None)


async def _get(http: httpx.AsyncClient, path: str, schema: type[T]) -> T:
    """Return a typed answer. Raises TransportError, NotAuthenticated, Unavailable or GatewayRefused."""
    try:
        response = await http.get(path)
    except httpx.HTTPError as error:
        raise TransportError(f"no answer from {http.base_url}: {str(error) or type(error).__name__}") from error
    try:
        if response.is_success:
            return msgspec.json.decode(response.content, type=schema)
        message = msgspec.json.decode(response.content, type=ErrorResponse).error.message
    except msgspec.MsgspecError as error:
        raise TransportError(f"{http.base_url} answers {response.status_code} and is no gateway") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise NotAuthenticated(message)
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise Unavailable(message)
    raise GatewayRefused(message)


def _link_of(error: ThermoclineError) -> Link:
    if isinstance(error, NotAuthenticated):
        return "unauthorised"
    if isinstance(error, Unavailable):
        return "scheduler away"
    return "refused" if isinstance(error, GatewayRefused) else "disconnected"
