"""What the storage measures (Prometheus)."""

from __future__ import annotations

from shared import metrics

COPIED_BYTES = metrics.counter("storage_copied_bytes", "KV bytes copied and sealed", ("direction",))
COPY_SECONDS = metrics.counter("storage_copy_seconds", "Time that I/O threads spent copying", ("direction",))
COPY_LATENCY = metrics.histogram("storage_transfer_seconds", "Time of one copy, without waiting", ("direction",))
FAILURES = metrics.counter("storage_failures", "Orders answered with an error", ("order",))
TRANSFERS = metrics.gauge("storage_transfers", "Backups that wait or run")
POOL_BYTES = metrics.gauge("storage_host_pool_bytes", "Bytes of the host pool's segment")
OUTBOX = metrics.gauge("storage_outbox_events", "Events that the broker has not acknowledged")
PLAN_SECONDS = metrics.histogram("storage_plan_delay_seconds", "From the scheduler's publishing a plan to its arrival")
PLANS_FETCHED = metrics.counter("storage_plans_fetched", "Plans read from the stream because they had been missed")

DEVICE_TO_HOST = "device_to_host"
