"""Recent requests, and explanations of how each was served. A tenant sees its own; the admin key sees all."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.admin_key import check_admin
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.explanation import Explanation, ExplanationList
from services.gateway.openapi import describes
from services.gateway.pending import Slots
from services.gateway.query import whole_number
from services.gateway.recent_requests import RecentRequest
from shared.errors import NotFound

AT_ONCE = 16
LISTED = 20
MOST_LISTED = 100


def requests_router(gateway: Gateway) -> APIRouter:
    """Return the routes that list and explain recent requests."""
    router = APIRouter(tags=["requests"])
    slots, operators = Slots(AT_ONCE), Slots(AT_ONCE)  # Tenants that ask much do not shut out who looks into it.

    @router.get(
        "/v1/requests",
        response_model=None,
        openapi_extra=describes(
            None,
            ExplanationList,
            query={
                "limit": f"requests to list, 1 to {MOST_LISTED}, {LISTED} without it",
                "after": "request_id of the last of the page before: older ones follow",
            },
        ),
        summary="Recent requests, explained",
    )
    async def list_requests(http: Request) -> Response:
        if not gateway.callers.has_keys and not _is_admin(http):
            # Without keys callers cannot be told apart, and none may see the others' requests.
            check_admin(http.headers, gateway.config.admin_key)
        limit = whole_number(http, "limit", LISTED, 1, MOST_LISTED)
        after = http.query_params.get("after")
        own = [known for known in gateway.recent.newest_first() if _may_see(http, known)]
        if after is not None:
            # A forgotten request was older than all kept ones, so none follows it.
            ahead = next((place for place, known in enumerate(own) if known.request_id == after), len(own))
            own = own[ahead + 1 :]
        with (operators if _is_admin(http) else slots).taken():
            data = await gateway.explainer.explain(own[:limit], is_admin=_is_admin(http))
        return json_response(ExplanationList(data=data, has_more=len(own) > limit))

    @router.get(
        "/v1/requests/{name}/explain",
        response_model=None,
        openapi_extra=describes(None, Explanation),
        summary="Where a request's time went, and where each part of its prompt came from",
    )
    async def explain_request(http: Request, name: str) -> Response:
        known = gateway.recent.find(name)
        if known is None or not _may_see(http, known):
            raise NotFound(f"there is no recent request {name[:64]!r} at this gateway", code="request_not_found")
        with (operators if _is_admin(http) else slots).taken():
            (found,) = await gateway.explainer.explain([known], is_admin=_is_admin(http))
        return json_response(found)

    return router


def _is_admin(http: Request) -> bool:
    return bool(http.scope.get("state", {}).get("is_admin"))


def _may_see(http: Request, known: RecentRequest) -> bool:
    return _is_admin(http) or known.tenant == http.scope.get("state", {}).get("tenant", "")
