"""The outermost layer: request ids, keys, metrics, and an answer in the API's shape for every error."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import metrics
from services.gateway.accounts import Account
from services.gateway.admin_key import check_admin, holds_admin_key, is_admin_path, is_open_to_admin
from services.gateway.audit import Audit
from services.gateway.callers import Callers
from services.gateway.error_answers import error_answer, error_headers, is_messages_path
from services.gateway.route_access import check_path, is_administration
from shared import logs
from shared.errors import InternalError, NotAuthenticated, ThermoclineError
from shared.ids import new_id

GUARDED_PREFIXES = ("/v1", "/tokenize", "/detokenize")

_log = logs.get_logger("gateway.http")


class Boundary:
    """The ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, callers: Callers, admin_key: str = "") -> None:
        """Answer for ``app``, whose routes check again who may call them (``route_access``)."""
        self._app = app
        self._callers = callers
        self._admin_key = admin_key
        self._audit = Audit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: check its key, mark it with an id, count it, and turn exceptions into error answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        account: Account | None = None
        request_id = new_id("http")
        scope.setdefault("state", {})["request_id"] = request_id
        logs.bind(request_id=request_id)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_own_headers(scope, request_id, account)]
            await send(message)

        metrics.CONNECTIONS_OPEN.inc()
        try:
            check_path(scope["path"])
            if is_admin_path(scope["path"]):
                check_admin(Headers(scope=scope), self._admin_key)
            elif is_open_to_admin(scope["path"]) and holds_admin_key(Headers(scope=scope), self._admin_key):
                scope["state"]["is_admin"] = True
            elif scope["path"].startswith(GUARDED_PREFIXES):
                account = self._callers.identify(Headers(scope=scope))
                scope["state"]["account"], scope["state"]["tenant"] = account, account.name
                if scope["method"] == "POST":
                    account.begin_request()
            await self._app(scope, receive, send_marked)
        except ThermoclineError as error:
            if error.status == 500:
                _log.error("request_failed", path=scope["path"], code=error.code, reason=error.message)
            if isinstance(error, NotAuthenticated):
                scope["state"]["refusal"] = error
            await send_error(scope, send_marked, error, started=bool(status))
        except Exception:
            _log.exception("request_failed", path=scope["path"])
            unexpected = InternalError("an unexpected error; the gateway's log has details")
            await send_error(scope, send_marked, unexpected, started=bool(status))
        finally:
            if "refusal" in scope["state"]:
                self._audit.refused(scope, scope["state"]["refusal"])
            if is_administration(scope) or is_admin_path(scope["path"]):
                self._audit.administered(scope, status)
            metrics.CONNECTIONS_OPEN.dec()
            metrics.HTTP_REQUESTS.labels(_route_of(scope), _method_of(scope), str(status or 499)).inc()


async def send_error(scope: Scope, send: Send, error: ThermoclineError, *, started: bool = False) -> None:
    """Send ``error`` as a whole response; send nothing once a response has started."""
    if started:
        return
    status, body = error_answer(error, scope["path"], scope.get("state", {}).get("request_id", ""))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _own_headers(scope: Scope, request_id: str, account: Account | None) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", request_id.encode())]
    if is_messages_path(scope["path"]):
        headers.append((b"request-id", request_id.encode()))
    if account is not None and scope["method"] == "POST":
        headers += [(name.encode(), value.encode()) for name, value in account.headers().items()]
    return headers


def _route_of(scope: Scope) -> str:
    # Labels are routes, not paths: a path is the caller's choice and would make series without end.
    return getattr(scope.get("route"), "path", "unmatched")


def _method_of(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "OTHER"
