"""JSON responses of routes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """Return ``body``, which msgspec can encode, as JSON with status 200."""
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
