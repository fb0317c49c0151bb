"""The routes of answers, which are called without the framework's layers."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from services.gateway.direct_routes import DirectRoutes
from services.gateway.metrics import HTTP_REQUESTS
from services.gateway.request_spans import TRACED_PATHS
from shared.errors import InternalError, NotAuthenticated
from tests.unit.gateway.running_gateway import running_gateway, says

PATH = "/v1/answers"


class Passed:
    """An application that notes what was passed on to it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.append((scope.get("method", ""), scope.get("path", "")))


def answering() -> APIRouter:
    router = APIRouter()

    @router.post(PATH, response_model=None)
    async def answer(http: Request) -> Response:
        return Response(b"answered")

    @router.get("/v1/others", response_model=None)
    async def others(http: Request) -> Response:
        return Response(b"others")

    return router


async def sent_by(routes: DirectRoutes, method: str, path: str, kind: str = "http", **state: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": kind, "method": method, "path": path, "headers": [], "state": state}
    await routes(scope, None, send)  # type: ignore[arg-type]
    assert not sent or scope["route"].path == path
    return sent


async def test_a_post_to_a_path_is_answered_and_all_else_is_passed_on() -> None:
    """Also other methods of that path, paths that only begin so, and what is not HTTP."""
    app = Passed()
    routes = DirectRoutes(app, [answering()], [PATH])
    others = [("GET", PATH), ("OPTIONS", PATH), ("POST", PATH + "/"), ("POST", "/v1/others"), ("GET", "/v1/others")]
    for method, path in others:
        assert not await sent_by(routes, method, path, account=object())
    assert not await sent_by(routes, "", "", kind="lifespan")

    assert app.requests == [*others, ("", "")]
    assert [message.get("body") for message in await sent_by(routes, "POST", PATH, account=object())][-1] == b"answered"
    assert len(app.requests) == len(others) + 1


async def test_a_caller_that_was_not_identified_is_refused() -> None:
    """As a route of the framework refuses it."""
    with pytest.raises(NotAuthenticated):
        await sent_by(DirectRoutes(Passed(), [answering()], [PATH]), "POST", PATH)


def test_a_path_without_a_route_is_refused_at_the_start() -> None:
    """A route of another method does not count."""
    with pytest.raises(KeyError):
        DirectRoutes(Passed(), [answering()], ["/v1/others"])


@pytest.mark.parametrize("path", TRACED_PATHS)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("lost"), "an unexpected error; the gateway's log has details"),
        (InternalError("known"), "known"),
    ],
)
async def test_what_an_endpoint_raises_is_answered_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, path: str, error: Exception, message: str
) -> None:
    """In the API's shape, and under its route."""

    async def broken(*arguments: Any) -> Response:
        raise error

    for module in ("chat", "completions", "messages", "responses"):
        monkeypatch.setattr(f"services.gateway.routes.{module}.serve", broken)
    counted = HTTP_REQUESTS.labels(path, "POST", "500")
    before = counted._value.get()
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(says("x")) as harness:
            answered = await harness.client.post(path, json={})

    assert answered.status_code == 500
    assert answered.json()["error"]["message"] == message
    assert answered.headers["x-request-id"]
    assert [line["path"] for line in lines if line["event"] == "request_failed"] == [path]
    assert counted._value.get() == before + 1
