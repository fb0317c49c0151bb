"""The router's ASGI application: forwarding, its own pages, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from services.gateway.admin_key import check_admin
from services.gateway.error_answers import error_answer, error_headers
from services.gateway.event_stream import ABORT_EXTENSION
from services.gateway.failures import unknown_route
from services.gateway.openai_schema.models import Version
from services.gateway.router.forwarding import forward
from services.gateway.router.metrics import own_families
from services.gateway.router.model_list import model_list
from services.gateway.router.parts import Router
from services.gateway.router.paths import forwarded_methods
from services.gateway.router.relay import StreamEnded
from services.gateway.router.upstream import Header
from services.gateway.router.views import cells_view, health_view
from services.gateway.routes.operations import METRICS_PATH, METRICS_TYPE, package_version
from shared import logs
from shared.errors import InternalError, InvalidRequest, NotFound, RequestCancelled, ThermoclineError, Unavailable
from shared.ids import new_id
from shared.metrics import render

TYPE: Header = (b"content-type", b"application/json")
MODELS = "/v1/models"
READY = ("/health", "/health/ready", "/ping")

_log = logs.get_logger("router.http")

ID = b"x-request-id"

Answer = tuple[int, list[Header], bytes]  # Status, headers, body.
Page = Callable[[Headers], Awaitable[Answer]]


class RouterApp:
    """The application. Its paths are few and fixed, so no framework stands between a stream and its client."""

    def __init__(self, router: Router) -> None:
        """Serve with the parts of ``router``, which are run and closed elsewhere."""
        self._router = router
        self._pages: dict[str, Page] = {
            "/health/live": self._live,
            **dict.fromkeys(READY, self._ready),
            "/version": self._version,
            "/v1/cells": self._cells,
            METRICS_PATH: self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error after the first byte ends the connection, any other is an error answer."""
        if scope["type"] != "http":
            return
        request_id = new_id("router")
        logs.bind(request_id=request_id)
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._answer(scope, receive, send_noted, request_id)
            return
        except (RequestCancelled, StreamEnded) as error:
            _log.info("answer_ended", code=error.code, reason=error.message)
            failure: ThermoclineError = error
        except ThermoclineError as error:
            failure = error
        except Exception:
            _log.exception("request_failed", path=scope["path"])
            failure = InternalError("an unexpected error; the router's log has details")
        if has_begun:
            _drop(scope, failure)
        else:
            await _send_error(scope["path"], send, failure, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        path, method = scope["path"], scope["method"]
        forwarded = forwarded_methods(path)
        if forwarded:
            _allow(method, path, *forwarded)
            await forward(self._router, scope, receive, send)
            return
        headers = Headers(scope=scope)
        if path == MODELS or path.startswith(MODELS + "/"):
            _allow(method, path, "GET")
            answer = await model_list(self._router, scope)
        elif path in self._pages:
            _allow(method, path, "GET", "HEAD")
            answer = await self._pages[path](headers)
        else:
            error = unknown_route(method, path)
            raise NotFound(f"{error.message}; the cells' gateways may have it", code=error.code)
        await _send_whole(send, answer, request_id, has_body=method != "HEAD")

    async def _live(self, headers: Headers) -> Answer:
        return _json(b'{"status":"live"}')

    async def _ready(self, headers: Headers) -> Answer:
        health = health_view(self._router)
        body = msgspec.json.encode(health)
        if health.status != "not_ready":
            return _json(body)
        return 503, [TYPE, *_raw(error_headers(Unavailable("")))], body

    async def _version(self, headers: Headers) -> Answer:
        return _json(msgspec.json.encode(Version(version=package_version())))

    async def _cells(self, headers: Headers) -> Answer:
        check_admin(headers, self._router.config.admin_key)
        return _json(msgspec.json.encode(cells_view(self._router)))

    async def _metrics(self, headers: Headers) -> Answer:
        if self._router.config.api_metrics == "closed":
            raise unknown_route("GET", METRICS_PATH)
        if self._router.config.api_metrics == "admin":
            check_admin(headers, self._router.config.admin_key)
        families = own_families(summaries=self._router.config.summaries)
        return 200, [(b"content-type", METRICS_TYPE.encode())], render(*families)


class _NotAllowed(InvalidRequest):
    """A path without this method (405); ``allowed`` are those that it has."""

    code, status = "method_not_allowed", 405

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed for {path}")
        self.allowed = allowed


def _allow(method: str, path: str, *allowed: str) -> None:
    if method not in allowed:
        raise _NotAllowed(method, path, allowed)


def _json(body: bytes) -> Answer:
    return 200, [TYPE], body


def _raw(headers: Mapping[str, str]) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _send_whole(send: Send, answer: Answer, request_id: str, *, has_body: bool = True) -> None:
    """Send an answer with its length, under the router's id unless it has a gateway's."""
    status, headers, body = answer
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    if not any(name == ID for name, _ in headers):
        headers.append((ID, request_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body if has_body else b""})


async def _send_error(path: str, send: Send, error: ThermoclineError, request_id: str) -> None:
    status, body = error_answer(error, path, request_id)
    headers = [TYPE, *_raw(error_headers(error))]
    if isinstance(error, _NotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    await _send_whole(send, (status, headers, body), request_id)


def _drop(scope: Scope, error: ThermoclineError) -> None:
    """Abort the connection of an answer that cannot be completed, so that it is not taken for whole.

    A stream whose last event is its error was ended in order, and is not aborted.
    """
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    was_told = isinstance(error, StreamEnded) and error.was_told
    if abort is not None and not was_told:
        abort()
