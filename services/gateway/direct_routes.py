"""The routes of answers, called without the framework's layers.

Those layers look through every route, keep exit stacks, and wrap what is sent: a seventh of the time from a request's
bytes to its submission. The routes stay with the framework, too, which describes them and has all other methods and
paths.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.route_access import identified


class DirectRoutes:
    """ASGI middleware that calls the endpoint of a POST to one of some paths itself; all else goes to the app.

    It is used within the boundary, which turns what an endpoint raises into an answer.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], paths: Iterable[str]) -> None:
        """Serve the ``paths``, each of a route of ``routers`` without parameters, to callers with a key.

        Raises KeyError for a path that has no route.
        """
        routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
        by_path = {route.path: route for route in routes if "POST" in (route.methods or ())}
        self._routes = {path: by_path[path] for path in paths}
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on. Raises what the endpoint raises."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # The boundary counts requests by it.
        http = Request(scope, receive, send)
        await identified(http)
        response = await route.endpoint(http)
        await response(scope, receive, send)
