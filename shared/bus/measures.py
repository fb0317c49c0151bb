"""Metrics of the bus's connection."""

from __future__ import annotations

from shared import metrics

CONNECTED = metrics.gauge("bus_connected", "Whether this process is connected to the broker (0 or 1)")
LOST = metrics.counter("bus_connections_lost_total", "Connections to the broker that ended", ("reason",))
DROPPED = metrics.counter("bus_messages_dropped_total", "Messages that came faster than they were handled")
REFUSED = metrics.counter("bus_connections_refused_total", "Attempts to connect that the broker or we refused")
DENIED = metrics.counter("bus_permissions_denied_total", "Subjects that the broker did not let us use", ("verb",))
MISDIRECTED = metrics.counter("bus_messages_misdirected_total", "Stored messages that a user had delivered elsewhere")
