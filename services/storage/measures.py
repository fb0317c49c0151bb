"""The storage's Prometheus metrics."""

from __future__ import annotations

from itertools import product

from shared import metrics

COPIED_BYTES = metrics.counter("storage_copied_bytes", "KV bytes copied and sealed", ("direction",))
COPY_PAUSES = metrics.counter(
    "storage_copy_pauses_seconds", "Time that copies from devices waited to keep to their share"
)
COPY_LATENCY = metrics.histogram("storage_transfer_seconds", "Time of one copy, without waiting", ("direction",))
FAILURES = metrics.counter("storage_failures", "Orders answered with an error", ("order",))
TRANSFERS = metrics.gauge("storage_transfers", "Backups that wait or run")
POOL_BYTES = metrics.gauge("storage_host_pool_bytes", "Bytes of the host pool's segment")
HIDDEN_POOL_BYTES = metrics.gauge("storage_hidden_pool_bytes", "Bytes of the hidden pool's segment")
OUTBOX = metrics.gauge("storage_outbox_events", "Events that the broker has not acknowledged")
PLAN_SECONDS = metrics.histogram("storage_plan_delay_seconds", "From the scheduler's publishing a plan to its arrival")
PLANS_FETCHED = metrics.counter("storage_plans_fetched", "Plans read from the stream because they had been missed")
REMOTE_REQUESTS = metrics.counter("storage_remote_requests", "Calls to the object store", ("verb", "outcome"))
REMOTE_SECONDS = metrics.histogram("storage_remote_seconds", "Time of one call, retries included", ("verb",))
REMOTE_RETRIES = metrics.counter("storage_remote_retries", "Attempts after the first one of a call", ("verb",))
REMOTE_BREAKER = metrics.gauge("storage_remote_breaker", "Circuit breaker: 0 closed, 1 probing, 2 open")
REMOTE_BYTES = metrics.counter("storage_remote_bytes", "Bytes of blobs to and from the object store", ("direction",))
CIPHER_REFUSALS = metrics.counter("storage_cipher_refusals", "Chunks not sealed or not opened", ("operation", "reason"))
KEYS = metrics.gauge("storage_keys", "Encryption keys that are loaded")
KEY_FAULTS = metrics.counter("storage_key_faults", "Reloads of the keys file that were refused")

DEVICE_TO_HOST = "device_to_host"

TIER_BYTES = metrics.counter("storage_tier_bytes", "Bytes of blobs read and written", ("tier", "direction"))
TIER_LATENCY = metrics.histogram(
    "storage_tier_latency_seconds", "Time of one read or write of a blob", ("tier", "direction")
)
TIER_FAILURES = metrics.counter("storage_tier_failures", "Times that a tier failed or was left out", ("tier",))
BAD_TIERS = ("disk", "remote", "pool", "lender")
"""Where chunks turn out to be bad: the tiers, this node's host pool, and another node's."""
BAD_REASONS = (
    "header_checksum", "integrity_error", "not_a_chunk", "sealed", "tells_tokens", "truncated", "unknown_version",
    "vanished", "wrong_checksum", "wrong_dtype", "wrong_geometry", "wrong_identity", "wrong_key", "wrong_layout",
    "wrong_namespace", "wrong_tokens",
)  # fmt: skip
"""Codes of an IntegrityError, and ``tells_tokens`` for chunks whose names reveal their tokens."""
BAD_CHUNKS = metrics.counter(
    "storage_bad_chunks",
    "Chunks that failed verification",
    ("tier", "reason"),
    known=product(BAD_TIERS, BAD_REASONS),
)
DISK_BYTES = metrics.gauge("storage_disk_bytes", "Bytes of chunks on the disk or in flight to it")
DISK_QUOTA = metrics.gauge("storage_disk_quota_bytes", "Bytes that the disk may hold")
DISK_CHUNKS = metrics.gauge("storage_disk_chunks", "Chunks on the disk")
DISK_FULL = metrics.counter("storage_disk_full", "Writes for which the disk had no room although the quota had")
CHUNKS_REFUSED = metrics.counter("storage_chunks_refused", "Chunks that the disk did not take", ("reason",))
EVICTED = metrics.counter("storage_chunks_evicted", "Chunks evicted from the disk")
SAVES = metrics.gauge("storage_saves", "Saves that wait or run")
FETCHES = metrics.gauge("storage_fetches", "Fetches that wait or run")
FETCH_SECONDS = metrics.histogram("storage_fetch_seconds", "From a fetch's arrival to its last event")
UPLOADS = metrics.counter("storage_uploads", "Uploads of chunks to the object store", ("outcome",))
UPLOADS_WAITING = metrics.gauge("storage_uploads_waiting", "Chunks that wait to be uploaded")
RECONCILE_WAITING = metrics.gauge("storage_reconcile_waiting", "Chunks of the disk still to be compared with the store")
PROMOTIONS = metrics.counter("storage_promotions", "Copies of chunks from the object store to the disk", ("outcome",))
SPARSE_COPIES = metrics.counter("storage_sparse_copies", "Copies of KV for reads in part", ("outcome",))
REMOVALS = metrics.gauge("storage_removals", "Files of chunks that wait to be deleted")
IO_WAITING = metrics.gauge("storage_io_waiting", "Calls that wait for an I/O thread", ("lane",))
PACED_SECONDS = metrics.counter("storage_disk_paced_seconds", "Time that reads waited for the limit of the disk")
STAGING_TAKEN = metrics.gauge("storage_staging_buffers", "Buffers of chunks in use")
OVERTAKEN = metrics.counter("storage_saves_overtaken", "Writes to host pages that a save had still to read")
SPARSE_CALLS = metrics.counter("storage_sparse_calls", "Reads of parts of chunks that were answered", ("part",))
SPARSE_BYTES = metrics.counter("storage_sparse_bytes", "Bytes of parts of chunks written to workers' memory")
SPARSE_SECONDS = metrics.histogram("storage_sparse_seconds", "Time of one read of parts of chunks, waiting included")
SPARSE_FAILURES = metrics.counter("storage_sparse_failures", "Reads of parts of chunks that failed", ("code",))


def moved(tier: str, direction: str, nbytes: int, seconds: float) -> None:
    """Record a blob that was read from a tier, or written to it."""
    TIER_BYTES.labels(tier, direction).inc(nbytes)
    TIER_LATENCY.labels(tier, direction).observe(seconds)
