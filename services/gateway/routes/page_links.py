"""One-time links to the page: made under the admin key, and used by the page without one."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.cell import PageCode, PageKey, PageLink
from services.gateway.openapi import describes
from services.gateway.page_links import KEPT_S, PageLinks
from services.gateway.route_access import administration
from shared.errors import NotFound

_UNCACHED = {"cache-control": "no-store"}


def page_links_router(gateway: Gateway) -> APIRouter:
    """Return the routes of links to the page."""
    router = APIRouter(tags=["cell"])
    links = PageLinks(gateway.clock)

    @router.post(
        "/v1/cell/page-link",
        response_model=None,
        dependencies=[Depends(administration(gateway.config.admin_key))],
        openapi_extra=describes(None, PageLink),
        summary="Make a link that opens the page at /ui once",
    )
    async def make() -> Response:
        code = links.make()
        return json_response(PageLink(code=code, path=f"/ui#once={code}", expires_in_s=KEPT_S), _UNCACHED)

    @router.post(
        "/ui/key",
        response_model=None,
        openapi_extra=describes(PageCode, PageKey),
        summary="Exchange the code of a link for the admin key, once",
    )
    async def use(http: Request) -> Response:
        async with gateway.bodies.read(http) as body:
            given = await gateway.bodies.decode(body, PageCode)
        if not links.use(given.code):
            raise NotFound(
                "this link was used before, or is too old: `thermocline top --link` prints another",
                code="page_link_used",
            )
        return json_response(PageKey(admin_key=gateway.config.admin_key), _UNCACHED)

    return router
