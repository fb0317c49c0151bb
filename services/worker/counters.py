"""Counts of one incarnation's work, for ``rpc.worker.<id>.inventory``."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Monotonic counts. Written by the compute thread, read by the event loop."""

    steps: int = 0
    steps_repeated: int = 0  # Passes thrown away because a load or the computation failed.
    batches: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens: int = 0
    tokens_proposed: int = 0  # Proposed by prompt lookup, to be verified in a decode step.
    tokens_accepted: int = 0  # Proposed tokens that the model chose.
    requests_admitted: int = 0
    requests_refused: int = 0
    texts_missing: int = 0  # Admissions that referred to a text which was not kept.
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_preempted: int = 0
    requests_replaced: int = 0
    leases_requested: int = 0
    pages_loaded: int = 0
    load_bytes: int = 0
    loads_failed: int = 0
    compute_failures: int = 0
    bubble_us: int = 0  # Time of decode steps while a batch was only loading.
    bubble_tokens: int = 0
    load_stall_us: int = 0  # Time in which computation waited for a load.
    tokens_restored: int = 0  # Tokens whose KV was restored from hidden pages.
    restore_us: int = 0
    restores_refused: int = 0  # Hidden pages failed verification, or could not be used.
    sparse_prefixes_loaded: int = 0
    sparse_prefixes_refused: int = 0  # Prefixes that could not be read.
    sparse_disk_bytes: int = 0
    sparse_read_us: int = 0  # Time in which computation waited for sparse prefixes.
    sparse_layers_fallen_back: int = 0  # Probe heads disagreed, so that all keys were read.
    promotions_done: int = 0
    promotions_failed: int = 0
    pages_promoted: int = 0
    hidden_rows_taken: int = 0  # Tokens whose hidden states were taken down within their step.
    hidden_chunks_saved: int = 0
    hidden_ring_full: int = 0  # Sequences saved no further because the ring had no room.
    hidden_lease_full: int = 0  # Sequences saved no further because their lease had no pages.

    def as_dict(self) -> dict[str, int]:
        """Return all counts by field name."""
        return asdict(self)
