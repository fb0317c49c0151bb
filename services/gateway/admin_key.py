"""Whether a caller may administer the cache. The key of the ordinary API never opens this."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers

from shared.errors import InvalidRequest, NotAuthenticated, ThermoclineError

ADMIN_PREFIX = "/v1/cache"
ADMIN_HEADER = "x-admin-key"


def is_admin_path(path: str) -> bool:
    """Whether a path is one of the administration's, rather than one of the API's."""
    return path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")


def check_admin(headers: Headers, admin_key: str) -> None:
    """Raises NotAuthenticated without the key, and InvalidRequest (403) where no key is configured."""
    if not admin_key:
        raise _closed()
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (headers.get(ADMIN_HEADER, ""), bearer.strip() if scheme.lower() == "bearer" else "")
    # Both are compared, each in constant time, so that the time says nothing about which one came close.
    matches = [hmac.compare_digest(key.encode(), admin_key.encode()) for key in given]
    if not any(matches):
        raise NotAuthenticated(
            "the admin key is required: X-Admin-Key: KEY, or Authorization: Bearer KEY", code="invalid_admin_key"
        )


def _closed() -> ThermoclineError:
    error = InvalidRequest("the cache's administration is off: this gateway has no --admin-key", code="admin_disabled")
    error.status, error.kind = 403, "permission_error"
    return error
