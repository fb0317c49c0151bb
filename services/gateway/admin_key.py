"""Whether a caller may administer the cell. A key of the ordinary API never opens these paths."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers

from shared.errors import InvalidRequest, NotAuthenticated

ADMIN_PREFIXES = (
    *("/v1/cache", "/v1/cell", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/reset_prefix_cache", "/flush_cache"),
)
REQUESTS_PREFIX = "/v1/requests"
ADMIN_HEADER = "x-admin-key"


def is_admin_path(path: str) -> bool:
    """Return whether a path belongs to the administration rather than the API."""
    return any(path == prefix or path.startswith(prefix + "/") for prefix in ADMIN_PREFIXES)


def is_open_to_admin(path: str) -> bool:
    """Return whether a path of the API accepts the admin key too."""
    return path == REQUESTS_PREFIX or path.startswith(REQUESTS_PREFIX + "/")


def holds_admin_key(headers: Headers, admin_key: str) -> bool:
    """Return whether the headers hold the admin key; always False where none is configured."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (headers.get(ADMIN_HEADER, ""), bearer.strip() if scheme.lower() == "bearer" else "")
    # Both are compared, each in constant time, so that the time does not show which one came close.
    matches = [hmac.compare_digest(key.encode(), admin_key.encode()) for key in given]
    return bool(admin_key) and any(matches)


def check_admin(headers: Headers, admin_key: str) -> None:
    """Raise NotAuthenticated without the admin key, and InvalidRequest (403) where none is configured."""
    if not admin_key:
        raise _AdminDisabled("the administration is off: this gateway has no --admin-key")
    if not holds_admin_key(headers, admin_key):
        raise NotAuthenticated(
            "the admin key is required: X-Admin-Key: KEY, or Authorization: Bearer KEY", code="invalid_admin_key"
        )


class _AdminDisabled(InvalidRequest):
    """A call of the administration at a gateway without an admin key (403)."""

    code, status, kind = "admin_disabled", 403, "permission_error"
