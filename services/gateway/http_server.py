"""uvicorn under this project's lifecycle: its socket is bound first, and signals stay with the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.gateway.audit import LimitedLines, LineLimit
from services.gateway.connections import Connections
from services.gateway.http_protocol import GatewayHttpProtocol
from services.gateway.tls import ServerTls
from shared import logs
from shared.errors import OperatorError

BACKLOG = 16_384
KEEP_ALIVE_S = 75
LAST_RESPONSES_S = 5

_log = logs.get_logger("gateway.http")


class HttpServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, and reloads certificates that are replaced."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None) -> None:
        """Serve by ``config``, which has the TLS context of ``tls``; None is plain HTTP."""
        super().__init__(config)
        self._tls = tls

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to exit; watch the certificate's files meanwhile."""
        watching = asyncio.create_task(self._tls.watch()) if self._tls is not None else None
        try:
            await super().serve(sockets)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers, unlike uvicorn: the lifecycle handles signals."""
        yield


def make_server(app: ASGIApp, bounds: Connections, tls: ServerTls | None = None) -> HttpServer:
    """Return a server of ``app``. It speaks only HTTPS where ``tls`` is given; ``bounds`` count its connections."""
    malformed = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, LimitedLines) for each in malformed.filters):
        malformed.addFilter(LimitedLines(LineLimit()))
    protocol: Any = partial(GatewayHttpProtocol, bounds=bounds)  # uvicorn only calls it.
    return HttpServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_RESPONSES_S,
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        ),
        tls,
    )


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises OperatorError when the address is not available."""
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise OperatorError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def raise_file_limit() -> int:
    """Raise the limit on open files to the hard limit, since every connection is one. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:
            _log.warning("file_limit_kept", soft=soft, hard=hard, reason=str(error))
    return soft
