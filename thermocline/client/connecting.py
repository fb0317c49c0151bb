"""Connections to one gateway: through the proxy of the environment, but direct to this machine."""

from __future__ import annotations

from typing import Any

import httpx

from shared.loopback import is_loopback

MOST_PORT = 65535


def check_port(url: httpx.URL) -> None:
    """Raise httpx.InvalidURL for a port that no server can have; httpx takes any number."""
    if url.port is not None and not 1 <= url.port <= MOST_PORT:
        raise httpx.InvalidURL(f"the port must be from 1 to {MOST_PORT}")


def connect(base_url: str | httpx.URL, **settings: Any) -> httpx.AsyncClient:
    """Return a client of the server at ``base_url``; ``settings`` are those of :class:`httpx.AsyncClient`.

    Proxies of the environment (``HTTP_PROXY``, ``ALL_PROXY`` and so on) do not apply to a loopback address, which a
    proxy would resolve to its own machine. Other settings of the environment, such as ``SSL_CERT_FILE``, always apply.
    Raises httpx.InvalidURL.
    """
    url = httpx.URL(base_url)
    check_port(url)
    # Both schemes, because "all://" has a lower precedence than the proxy of a scheme.
    mounts = dict.fromkeys(("http://", "https://")) if is_loopback(url.host) else {}
    return httpx.AsyncClient(base_url=url, mounts=mounts, **settings)
