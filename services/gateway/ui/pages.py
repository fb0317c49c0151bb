"""The files of the page at /ui, read once and served under a strict policy.

The page holds no secrets, so all clients may load it; its data comes from the API, with keys that its user enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from shared.errors import NotFound

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The page builds its elements one by one; text of prompts can never become markup.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Revalidated each time, and answered without a body while unchanged: an upgrade shows at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page. ``tag`` is the entity tag, quotes included."""

    body: bytes
    media_type: str
    tag: str


def read_files() -> dict[str, StaticFile]:
    """Return all files of the page by name; files of unknown types are left out."""
    found = {}
    for entry in sorted(files(__package__).joinpath("static").iterdir(), key=lambda entry: entry.name):
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            found[entry.name] = StaticFile(body, media_type, tag)
    return found


def ui_router() -> APIRouter:
    """Return the routes of the page; ``/ui`` redirects to ``/ui/``, so that relative URLs work behind a path prefix."""
    router = APIRouter(include_in_schema=False)
    pages = read_files()

    @router.api_route("/ui", methods=["GET", "HEAD"], response_model=None)
    async def entrance() -> Response:
        return RedirectResponse("ui/", 307, headers=_HEADERS)

    @router.api_route("/ui/", methods=["GET", "HEAD"], response_model=None)
    async def index(http: Request) -> Response:
        return _response(pages["index.html"], http)

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"], response_model=None)
    async def file(name: str, http: Request) -> Response:
        page = pages.get(name)
        if page is None:
            raise NotFound(f"the page has no file {name[:64]!r}", code="unknown_route")
        return _response(page, http)

    return router


def _response(page: StaticFile, http: Request) -> Response:
    headers = {**_HEADERS, "etag": page.tag}
    if page.tag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(page.body, headers=headers, media_type=page.media_type)
