"""Cross-origin requests (CORS): whether scripts of other sites' pages may call the API."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY = "*"
MAX_AGE_S = 600

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?")


def is_origin(text: str) -> bool:
    """Return whether the text is a scheme and host, with or without a port, or ``*`` for all."""
    return text == ANY or bool(_ORIGIN.fullmatch(text))


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return ``app`` with CORS headers for these origins, or ``app`` itself without any.

    No cookies are involved: callers identify themselves by keys.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=(ANY,),  # Clients of both companies send many of their own.
        expose_headers=(ANY,),
        max_age=MAX_AGE_S,
    )
