"""Metrics of a server's connections and bodies, shared by gateways and routers."""

from __future__ import annotations

from shared.metrics import counter, gauge

CONNECTIONS = gauge("listener_connections", "Open connections of clients")
CONNECTIONS_ENDED = counter("listener_connections_ended", "Connections ended by a bound of this process", ("reason",))
BODY_BYTES = gauge("listener_body_bytes", "Bytes of request bodies held, except short ones")

FULL, IDLE, SLOW = (CONNECTIONS_ENDED.labels(reason) for reason in ("full", "idle", "slow"))
