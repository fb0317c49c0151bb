"""GET and DELETE /v1/responses/{id}, the items of its request, and what is refused beside them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from services.gateway.admission import unsupported
from services.gateway.callers import caller_of
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.errors import ErrorResponse
from services.gateway.openapi import describes
from services.gateway.query import whole_number
from services.gateway.responses.items import Item, ItemList
from services.gateway.responses.kept import REPEATED_HEADER
from services.gateway.responses.schema import ResponseDeleted, ResponseObject
from shared.errors import InvalidRequest, NotFound

MOST_LISTED = 100
LISTED = 20

_SALT = {"cache_salt": "the salt of the request that was answered, where it had one"}
_PAGE = {
    **_SALT,
    "limit": f"items to list, 1 to {MOST_LISTED}, {LISTED} without it",
    "after": "the id of the item before the first",
    "order": "desc, which is the default, or asc",
}


def kept_responses_router(gateway: Gateway) -> APIRouter:
    """Return the routes that read, list and erase kept responses, and those that refuse to cancel or compact."""
    router = APIRouter(tags=["responses"])

    @router.get(
        "/v1/responses/{response_id}",
        response_model=None,
        openapi_extra=describes(None, ResponseObject, query=_SALT),
        summary="A kept response",
    )
    async def get_response(http: Request, response_id: str) -> Response:
        if http.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise unsupported("stream", "the response is over")
        kept = await gateway.kept.find(caller_of(http), http.query_params.get("cache_salt"), response_id)
        return json_response(kept.response)

    @router.delete(
        "/v1/responses/{response_id}",
        response_model=None,
        openapi_extra=describes(None, ResponseDeleted, query=_SALT),
        summary="Erase a kept response",
    )
    async def delete_response(http: Request, response_id: str) -> Response:
        try:
            await gateway.kept.erase(caller_of(http), http.query_params.get("cache_salt"), response_id)
        except NotFound:
            if REPEATED_HEADER not in http.headers:  # Otherwise the first of the two requests has erased it.
                raise
        return json_response(ResponseDeleted(id=response_id))

    @router.get(
        "/v1/responses/{response_id}/input_items",
        response_model=None,
        openapi_extra=describes(None, ItemList, query=_PAGE),
        summary="The input items of a kept response",
    )
    async def list_input_items(http: Request, response_id: str) -> Response:
        query = http.query_params
        limit = whole_number(http, "limit", LISTED, 1, MOST_LISTED)
        kept = await gateway.kept.find(caller_of(http), query.get("cache_salt"), response_id)
        return json_response(_page(kept.items, query.get("order", "desc"), query.get("after"), limit))

    @router.post(
        "/v1/responses/{response_id}/cancel",
        response_model=None,
        openapi_extra=describes(None, ResponseObject),
        summary="Refused: a response ends when its client goes",
    )
    async def cancel_response(http: Request, response_id: str) -> Response:
        await gateway.kept.find(caller_of(http), http.query_params.get("cache_salt"), response_id)
        raise InvalidRequest("only responses in the background can be cancelled", code="not_cancellable")

    @router.post(
        "/v1/responses/compact",
        response_model=None,
        openapi_extra=describes(None, ErrorResponse),
        summary="Refused: a conversation is used as it is sent",
    )
    async def compact_response() -> None:
        raise InvalidRequest(
            "compaction is not served: a conversation is used as it is sent", code="unsupported_endpoint"
        )

    return router


def _page(items: Sequence[Item], order: str, after: str | None, limit: int) -> ItemList:
    """Return a page of items. Raises InvalidRequest, NotFound."""
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((place for place, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise NotFound(f"there is no item {after[:64]!r}", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    first, last = (page[0].id or "", page[-1].id or "") if page else ("", "")
    return ItemList(data=page, first_id=first, last_id=last, has_more=len(ordered) > limit)
