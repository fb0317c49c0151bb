"""Connections to one gateway: through the proxy of the environment, but direct to this machine."""

from __future__ import annotations

from typing import Any

import httpx

from shared.loopback import is_loopback


def connect(base_url: str | httpx.URL, **settings: Any) -> httpx.AsyncClient:
    """Return a client of the server at ``base_url``; ``settings`` are those of :class:`httpx.AsyncClient`.

    Proxies of the environment (``HTTP_PROXY``, ``ALL_PROXY`` and so on) do not apply to a loopback address, which a
    proxy would resolve to its own machine. Other settings of the environment, such as ``SSL_CERT_FILE``, always apply.
    """
    url = httpx.URL(base_url)
    # Both schemes, because "all://" has a lower precedence than the proxy of a scheme.
    mounts = dict.fromkeys(("http://", "https://")) if is_loopback(url.host) else {}
    return httpx.AsyncClient(base_url=url, mounts=mounts, **settings)
