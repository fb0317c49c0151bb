"""The ASGI application of a composed gateway."""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from services.gateway.boundary import Boundary
from services.gateway.cross_origin import cross_origin
from services.gateway.direct_routes import DirectRoutes
from services.gateway.docs_page import docs_page
from services.gateway.error_answers import error_answer, error_headers
from services.gateway.failures import error_of_status
from services.gateway.gateway import Gateway
from services.gateway.openapi import install_openapi
from services.gateway.request_spans import TRACED_PATHS, TracedApp
from services.gateway.route_access import administration, identified
from services.gateway.routes.adapters import adapters_router
from services.gateway.routes.cache import cache_router
from services.gateway.routes.cell import cell_router
from services.gateway.routes.chat import chat_router
from services.gateway.routes.completions import completions_router
from services.gateway.routes.embeddings import embeddings_router
from services.gateway.routes.kept_responses import kept_responses_router
from services.gateway.routes.messages import messages_router
from services.gateway.routes.models import models_router
from services.gateway.routes.operations import operations_router, package_version
from services.gateway.routes.page_links import page_links_router
from services.gateway.routes.requests import requests_router
from services.gateway.routes.responses import responses_router
from services.gateway.routes.tokenization import tokenization_router
from services.gateway.ui.pages import ui_router
from shared import logs
from shared.errors import InternalError, InvalidRequest, NotAuthenticated, ThermoclineError

_log = logs.get_logger("gateway.http")

OF_CALLERS = (
    chat_router,
    completions_router,
    messages_router,
    responses_router,
    kept_responses_router,
    embeddings_router,
    models_router,
    tokenization_router,
    requests_router,
)
"""Routers whose routes need a caller's key, where any are configured."""

OF_ADMINISTRATION = (adapters_router, cache_router, cell_router)
"""Routers whose routes need the admin key."""

OF_ALL = (operations_router, page_links_router)
"""Routers whose routes are open, except those that name an access of their own."""


def build_app(gateway: Gateway) -> ASGIApp:
    """Build the application: routes, error translation, and around them the boundary, CORS and tracing."""
    app = FastAPI(
        title="Thermocline",
        version=package_version(),
        docs_url=None,  # Both of the framework's pages load scripts from other sites; ours is below.
        redoc_url=None,
        redirect_slashes=False,
    )
    of_callers = [router(gateway) for router in OF_CALLERS]
    for router in of_callers:
        app.include_router(router, dependencies=[Depends(identified)])
    for administered in OF_ADMINISTRATION:
        app.include_router(administered(gateway), dependencies=[Depends(administration(gateway.config.admin_key))])
    for open_to_all in OF_ALL:
        app.include_router(open_to_all(gateway))
    app.include_router(ui_router())
    app.add_exception_handler(ThermoclineError, _on_typed_error)
    app.add_exception_handler(HTTPException, _on_framework_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_unexpected_error)
    install_openapi(app)

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> str:
        return docs_page(app.openapi())

    routed = DirectRoutes(app, of_callers, TRACED_PATHS)
    bounded = Boundary(routed, gateway.callers, gateway.config.admin_key)
    served = cross_origin(bounded, gateway.config.cors_origins)
    if gateway.tracer is None:
        return served
    return TracedApp(served, gateway.tracer, gateway.config.trace_share)


def error_response(request: Request, error: ThermoclineError, headers: dict[str, str] | None = None) -> Response:
    """Return ``error`` as a response in the shape of the API that ``request`` called."""
    status, body = error_answer(error, request.url.path, request.scope.get("state", {}).get("request_id", ""))
    all_headers = {**(headers or {}), **error_headers(error)}
    return Response(body, status, headers=all_headers, media_type="application/json")


async def _on_typed_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ThermoclineError)
    if error.status == 500:
        _log.error("request_failed", path=request.url.path, code=error.code, reason=error.message)
    if isinstance(error, NotAuthenticated):
        request.scope["state"]["refusal"] = error  # For the boundary's audit log.
    return error_response(request, error)


async def _on_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    typed = error_of_status(error.status_code, str(error.detail), request.method, request.url.path)
    return error_response(request, typed, dict(error.headers or {}))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    return error_response(request, InvalidRequest(str(error)))


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    # The framework raises it again after this answer; the boundary logs it.
    return error_response(request, InternalError("an unexpected error; the gateway's log has details"))
