"""Metrics that every process exports: those of its connection to the broker, and of its log."""

from __future__ import annotations

from shared import metrics

CONNECTED = metrics.gauge("bus_connected", "Whether this process is connected to the broker (0 or 1)")
LOST = metrics.counter(
    "bus_connections_lost_total",
    "Connections to the broker that ended",
    ("reason",),
    known=[("slow_consumer",), ("refused",), ("lost",)],
)
DROPPED = metrics.counter("bus_messages_dropped_total", "Messages that came faster than they were handled")
REFUSED = metrics.counter("bus_connections_refused_total", "Attempts to connect that the broker or we refused")
DENIED = metrics.counter(
    "bus_permissions_denied_total",
    "Subjects that the broker did not let us use",
    ("verb",),
    known=[("publish",), ("subscribe",)],
)
MISDIRECTED = metrics.counter("bus_messages_misdirected_total", "Stored messages that a user had delivered elsewhere")
CALLS_MISDIRECTED = metrics.counter(
    "bus_calls_misdirected_total", "Calls that were dropped because their reply subject is no inbox"
)
LOG_LINES_LOST = metrics.counter("log_lines_lost", "Lines of this process's log that could not be written")
