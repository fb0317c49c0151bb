"""Routes for operators: health, metrics, version, and a small page that names the endpoints."""

from __future__ import annotations

import html
from importlib.metadata import PackageNotFoundError, version

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from msgspec import UNSET

from services.gateway.admin_key import holds_admin_key
from services.gateway.error_answers import error_headers
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.listening import ApiMetrics
from services.gateway.openai_schema.errors import error_detail
from services.gateway.openai_schema.models import Health, ServerLoad, Shortfall, Version
from services.gateway.openapi import describes
from services.gateway.route_access import administration
from services.gateway.views.serving_view import serving_view
from shared.errors import Unavailable
from shared.metrics import render

METRICS_PATH = "/metrics"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def package_version() -> str:
    """Return the installed version, or a stand-in in a bare checkout."""
    try:
        return version("thermocline")
    except PackageNotFoundError:
        return "0+unknown"


def operations_router(gateway: Gateway) -> APIRouter:
    """Return the routes of health, metrics and version, and the page at ``/``."""
    router = APIRouter(tags=["operations"])
    own_version = package_version()

    @router.get(
        "/health/live",
        response_model=None,
        openapi_extra=describes(None, Health),
        summary="Whether this process runs",
    )
    @router.head("/health/live", response_model=None, include_in_schema=False)
    async def live() -> Response:
        return json_response(Health(status="live"))

    @router.get(
        "/health/ready",
        response_model=None,
        openapi_extra=describes(None, Health),
        summary="Whether requests would be answered now",
    )
    @router.head("/health/ready", response_model=None, include_in_schema=False)
    @router.get("/health", response_model=None, include_in_schema=False)
    @router.head("/health", response_model=None, include_in_schema=False)
    @router.get("/ping", response_model=None, include_in_schema=False)
    @router.head("/ping", response_model=None, include_in_schema=False)
    async def ready(request: Request) -> Response:
        reasons = gateway.reasons_not_ready()
        degraded = msgspec.convert(gateway.degraded(), list[Shortfall], from_attributes=True)
        if not holds_admin_key(request.headers, gateway.config.admin_key):
            # Reasons name directories, stores and processes, and this path is open to all who reach the port.
            degraded = [msgspec.structs.replace(each, reason="") for each in degraded]
        if not reasons:
            status = gateway.cell.status
            health = Health(
                status="degraded" if degraded else "ready",
                cell=gateway.config.cell,
                model=gateway.facts.name,
                degraded=degraded or UNSET,
                serving=UNSET if status is None else serving_view(status, gateway.context_limit),
            )
            return json_response(health)
        error = Unavailable("not ready: " + "; ".join(reasons))
        body = Health(
            status="not_ready",
            cell=gateway.config.cell,
            model=gateway.facts.name,
            degraded=degraded or UNSET,
            reasons=reasons,
            error=error_detail(error),
        )
        return Response(
            msgspec.json.encode(body), error.status, headers=error_headers(error), media_type="application/json"
        )

    if gateway.config.api_metrics != "closed":
        access = [Depends(administration(gateway.config.admin_key))] if gateway.config.api_metrics == "admin" else []

        @router.get(
            METRICS_PATH,
            response_model=None,
            dependencies=access,
            summary="Prometheus metrics",
            response_class=Response,
        )
        async def get_metrics() -> Response:
            return Response(render(), headers={"content-type": METRICS_TYPE})

        @router.get(
            "/load",
            response_model=None,
            dependencies=access,
            openapi_extra=describes(None, ServerLoad),
            summary="Choices in progress at this gateway",
        )
        async def get_load() -> Response:
            return json_response(ServerLoad(server_load=gateway.slots.used))

    @router.get("/version", response_model=None, openapi_extra=describes(None, Version), summary="Version")
    async def get_version() -> Response:
        return json_response(Version(version=own_version))

    @router.api_route("/", methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_page(gateway.facts.name, own_version, gateway.config.api_metrics))

    return router


_ENDPOINTS = (
    ("POST", "/v1/chat/completions", "continue a conversation"),
    ("POST", "/v1/responses", "the same in OpenAI's newer API"),
    ("POST", "/v1/messages", "the same in Anthropic's API"),
    ("POST", "/v1/completions", "continue a text"),
    ("GET", "/v1/models", "the model of this cell"),
    ("POST", "/tokenize", "token ids of a text or a conversation"),
    ("POST", "/detokenize", "text of token ids"),
    ("GET", "/v1/cache", "cached prefixes and their tiers; for operators, under the admin key"),
    ("GET", "/v1/cell", "workers, pools and queue of the cell; for operators, under the admin key"),
    ("GET", "/ui", "a live page of the cell; for operators"),
    ("GET", "/health/live", "whether this process runs"),
    ("GET", "/health/ready", "whether requests would be answered now"),
    ("GET", METRICS_PATH, "Prometheus metrics"),
    ("GET", "/version", "version"),
    ("GET", "/docs", "requests and answers of the endpoints; for programs /openapi.json"),
)


_WORDS_ON_METRICS = {"open": "", "admin": "; for operators, under the admin key"}


def _page(model: str, own_version: str, api_metrics: ApiMetrics) -> str:
    """Return the page at ``/``; it loads nothing from anywhere."""
    rows = "".join(
        f"<tr><td>{method}</td><td><code>{path}</code></td><td>{what}"
        f"{_WORDS_ON_METRICS[api_metrics] if path == METRICS_PATH else ''}</td></tr>"
        for method, path, what in _ENDPOINTS
        if path != METRICS_PATH or api_metrics != "closed"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Thermocline</title>"
        "<meta name=viewport content='width=device-width'>"
        "<style>body{font:16px/1.6 system-ui,sans-serif;max-width:44rem;margin:4rem auto;padding:0 1rem;"
        "color:#0b2533;background:linear-gradient(#eaf6fb,#b9dcea) fixed}td{padding:.15rem 1rem .15rem 0}"
        "code{font-size:.95em}</style>"
        f"<h1>Thermocline</h1><p>Version {html.escape(own_version)}, serving <b>{html.escape(model)}</b> "
        f"behind an OpenAI-compatible API.</p><table>{rows}</table></html>"
    )
