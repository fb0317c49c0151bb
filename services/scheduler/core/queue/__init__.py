"""Queues of waiting requests: placement at workers, scans, batches, admission, decode room and completion."""
