"""Settings of servers, shared by gateways and routers and checked in one place."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from services.gateway.body import Bodies
from services.gateway.connections import Connections
from services.gateway.cross_origin import is_origin
from services.gateway.tls import ServerTls, TlsVersion
from shared.broker import BrokerSettings
from shared.ids import is_valid_name

MIN_ADMIN_KEY = 16

ApiMetrics = Literal["open", "admin", "closed"]


class ListeningSettings(BrokerSettings, frozen=True, kw_only=True):
    """The settings of a server.

    A process's settings inherit these and call ``listening_faults`` in ``__post_init__``.
    """

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    tls_cert: Annotated[
        str,
        Meta(description="PEM file of the certificate and its intermediates; empty is plain HTTP"),
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its private key, without a pass phrase")] = ""
    tls_min_version: Annotated[TlsVersion, Meta(description="oldest version of TLS: 1.2 or 1.3")] = "1.2"
    max_body_bytes: Annotated[int, Meta(description="largest request body", ge=1024)] = 16 * 1024**2
    body_timeout_ms: Annotated[int, Meta(description="longest wait for a request body", ge=1)] = 30_000
    max_buffered_bytes: Annotated[
        int,
        Meta(
            description="memory for all request bodies, half of it for one tenant; beyond it long ones get 429",
            ge=2**20,
        ),
    ] = 512 * 1024**2
    max_connections: Annotated[
        int, Meta(description="open connections; beyond it idle ones are closed, and then new ones refused", ge=1)
    ] = 16_384
    head_timeout_ms: Annotated[int, Meta(description="longest wait for the head of a request", ge=1)] = 10_000
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="origins of pages whose scripts may call the API, such as https://chat.example; none by default"
        ),
    ] = ()
    request_timeout_ms: Annotated[int, Meta(description="longest life of one request", ge=1)] = 1_800_000
    send_timeout_ms: Annotated[int, Meta(description="longest wait for a client to take a chunk", ge=1)] = 60_000
    grace_ms: Annotated[int, Meta(description="time that running requests get after SIGTERM", ge=0)] = 30_000
    api_metrics: Annotated[
        ApiMetrics,
        Meta(description="who gets /metrics at the API's port: all clients, holders of the admin key, or none"),
    ] = "open"
    metrics_port: Annotated[int, Meta(description="second port for /metrics; 0 is off", ge=0, le=65_535)] = 0
    metrics_host: Annotated[str, Meta(description="address to listen on for metrics_port")] = "127.0.0.1"
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"

    def bodies(self) -> Bodies:
        """Return the reader of request bodies, with these bounds."""
        return Bodies(self.max_body_bytes, self.body_timeout_ms / 1000, self.max_buffered_bytes)

    def connections(self) -> Connections:
        """Return the counter of connections, with these bounds."""
        return Connections(self.max_connections, self.head_timeout_ms / 1000)

    def server_tls(self) -> ServerTls | None:
        """Return the certificate settings, or None where the server speaks plain HTTP. Raises ConfigError."""
        return ServerTls(Path(self.tls_cert), Path(self.tls_key), self.tls_min_version) if self.tls_cert else None

    def listening_faults(self, *, name: str, longest: int, admin_key: str, api_keys: Collection[str] = ()) -> list[str]:
        """Return the faults of these settings, of a name with at most ``longest`` characters, and of the keys."""
        faults = self.broker_faults()
        if not is_valid_name(name) or len(name) > longest:
            faults.append(f"--id {name!r} must be 1 to {longest} letters, digits, - or _")
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            faults.append(f"--log-level {self.log_level!r} is not one of debug, info, warning, error")
        if admin_key and (len(admin_key) < MIN_ADMIN_KEY or not admin_key.isascii() or admin_key in api_keys):
            # The message must not hold the key: it goes to a terminal or a log.
            others = ", none of --api-keys" if api_keys else ""
            faults.append(f"--admin-key must have {MIN_ADMIN_KEY} ASCII characters or more{others}")
        if bool(self.tls_cert) != bool(self.tls_key):
            faults.append("--tls-cert and --tls-key need each other")
        faults += [f"--cors-origins: {origin!r} is no origin" for origin in self.cors_origins if not is_origin(origin)]
        if self.api_metrics == "admin" and not admin_key:
            faults.append("--api-metrics admin needs --admin-key")
        return faults
