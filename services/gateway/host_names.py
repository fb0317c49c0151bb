"""The names under which a server that listens on loopback answers.

A page of any site can have its own name resolve to 127.0.0.1 while it is open (DNS rebinding). Its scripts then call
this server as their own origin, and CORS does not apply. Their requests still carry the page's name as ``Host``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.boundary import send_error
from services.gateway.cross_origin import ANY
from shared.errors import InvalidRequest
from shared.loopback import is_loopback, without_brackets

LOCAL_DOMAINS = (".localhost", ".local", ".internal")
"""Domains that no site can have; containers reach this machine as ``host.docker.internal``."""

_PORT = re.compile(r":\d*\Z")


class OwnNamesOnly:
    """ASGI middleware that answers 421 to requests for another server's name."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """Pass on requests for ``names``, in lower case, for addresses, and for names that no site can have."""
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http" and not self._is_own(Headers(scope=scope).getlist("host")):
            error = InvalidRequest(
                "this server listens on loopback, and the request is for another host name; --cors-origins with the "
                "origin of that name lets it in",
                code="unknown_host",
                status=421,
            )
            await send_error(scope, send, error)
            return
        await self._app(scope, receive, send)

    def _is_own(self, hosts: list[str]) -> bool:
        # Without the header it is no browser's request.
        return all(is_local_name(name) or name in self._names for name in map(name_of, hosts))


def only_own_names(app: ASGIApp, host: str, origins: Collection[str] = ()) -> ASGIApp:
    """Return ``app`` with a check of names where ``host``, the address to listen on, is loopback; or ``app`` itself.

    The names of ``origins``, whose pages may call the API, are accepted; all are where any origin may.
    """
    if not is_loopback(host) or ANY in origins:
        return app
    return OwnNamesOnly(app, {socket.gethostname().lower(), *(urlsplit(each).hostname or "" for each in origins)})


def name_of(host: str) -> str:
    """Return the name in a ``Host`` header, in lower case and without the port."""
    return without_brackets(_PORT.sub("", host.strip().lower()))


def is_local_name(name: str) -> bool:
    """Return whether a name is an address, or one that only this machine or its network resolves.

    The name of a site has a dot, so that one without is of this network, such as a container's.
    """
    name = name.removesuffix(".")
    if name.endswith(LOCAL_DOMAINS):
        return True
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
