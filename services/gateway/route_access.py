"""Who may call a route, as a property of the route itself: a dependency that runs once the route is matched.

The boundary refuses callers by path before that, also on paths without a route. Should the two ever read a path
differently, the dependency refuses.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Scope

from services.gateway.admin_key import check_admin
from shared.errors import InvalidRequest, NotAuthenticated

Access = Callable[[Request], Awaitable[None]]
"""A dependency that raises for callers that may not call the route."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_path(path: str) -> None:
    """Raise InvalidRequest for a decoded path with a control character, which no route has.

    Paths are compared here and matched by the framework, whose patterns overlook a newline at the end.
    """
    if _CONTROL.search(path):
        raise InvalidRequest("the path of the request has a control character", code="invalid_path")


def administration(admin_key: str) -> Access:
    """Return the access of holders of the admin key; such calls are marked for the audit log."""

    async def check(http: Request) -> None:
        http.scope["state"]["is_administration"] = True
        check_admin(http.headers, admin_key)

    return check


async def identified(http: Request) -> None:
    """Raise NotAuthenticated unless the boundary has identified the caller, or found the admin key where it opens."""
    state = http.scope["state"]
    if "account" not in state and not state.get("is_admin"):
        raise NotAuthenticated("a valid API key is required")


def is_administration(scope: Scope) -> bool:
    """Return whether a request reached a route of the administration."""
    return bool(scope.get("state", {}).get("is_administration"))
