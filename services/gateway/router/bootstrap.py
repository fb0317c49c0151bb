"""The composition root: from settings to a running router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from services.gateway.cross_origin import cross_origin
from services.gateway.host_names import only_own_names
from services.gateway.http_server import HttpServer, bind, make_server, raise_file_limit
from services.gateway.pending import Slots
from services.gateway.router.app import RouterApp
from services.gateway.router.cells import Cells
from services.gateway.router.config import RouterConfig
from services.gateway.router.feed import Feed
from services.gateway.router.health import ask, watch_gateways
from services.gateway.router.metrics import own_families
from services.gateway.router.parts import Router
from services.gateway.router.upstream import Upstream
from shared import logs, progress
from shared.errors import ConfigError
from shared.lifecycle import Lifecycle
from shared.metrics import serve as serve_metrics

_log = logs.get_logger("router")


def compose(config: RouterConfig) -> Router:
    """Build the parts of one router. Raises ConfigError for a file of certificate authorities that cannot be read."""
    tls = _client_tls(config)
    gateways = {
        name: [Upstream(url, tls=tls, connect_s=config.connect_timeout_ms / 1000) for url in urls]
        for name, urls in config.urls.items()
    }
    cells = Cells(gateways, most_heads=config.most_heads)
    return Router(
        config=config, cells=cells, gateways=gateways, slots=Slots(config.max_inflight), bodies=config.bodies()
    )


async def run(config: RouterConfig, life: Lifecycle) -> None:
    """Serve until ``life`` stops. Raises OperatorError when the router cannot start as configured."""
    raise_file_limit()
    sock = bind(config.host, config.port)
    try:
        tls = config.server_tls()
        router = compose(config)
        feed = Feed(router)
        families = own_families(summaries=config.summaries)
        serve_metrics(config.metrics_port, config.metrics_host, beginnings=families)
        try:
            await feed.begin()
            await _ask_all(router)
            app = cross_origin(RouterApp(router), config.cors_origins)
            # Whether the cells ask for keys is theirs to know.
            app = only_own_names(app, config.host, config.cors_origins)
            server = make_server(app, config.connections(), tls)
            await _serve(router, feed, server, sock, life)
        finally:
            await feed.close()
            for gateways in router.gateways.values():
                for gateway in gateways:
                    gateway.close()
    finally:
        sock.close()


async def _ask_all(router: Router) -> None:
    """Check all gateways once: a cell that is away at the start must not be chosen for the first requests."""
    pairs = [(cell, gateway) for cell, gateways in router.gateways.items() for gateway in gateways]
    await asyncio.gather(*(ask(router, cell, gateway) for cell, gateway in pairs))
    for cell, gateway in pairs:
        if gateway.error:
            _log.warning("gateway_is_away", cell=cell, gateway=gateway.url, reason=gateway.error)


async def _serve(router: Router, feed: Feed, server: HttpServer, sock: socket.socket, life: Lifecycle) -> None:
    tasks = [
        asyncio.create_task(watch_gateways(router), name="health"),
        asyncio.create_task(feed.run(), name="feed"),
        asyncio.create_task(server.serve(sockets=[sock]), name="http"),
    ]
    host, port = sock.getsockname()[:2]
    progress.ready()
    _log.info("router_serving", host=host, port=port, cells=len(router.gateways))
    try:
        await life.watch(*tasks)
        router.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(router.config.grace_ms / 1000):
                await router.slots.idle.wait()
        router.end_all()
    finally:
        server.should_exit = True
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _client_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the TLS context for gateways, or None where none speaks HTTPS. Raises ConfigError."""
    if not any(url.startswith("https://") for urls in config.urls.values() for url in urls):
        return None
    try:
        return ssl.create_default_context(cafile=config.cell_ca or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cell-ca {config.cell_ca}: {error}") from error
