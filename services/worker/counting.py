"""Counters and metrics of what the compute thread has done."""

from __future__ import annotations

from services.worker import metrics
from services.worker.counters import Counters
from services.worker.kv.loads import LoadResult
from services.worker.kv.promotions import Promoted
from services.worker.outcome import Outcome
from services.worker.restore.leased_pages import SavedHidden
from services.worker.restore.two_stage import SavingCounts
from services.worker.restoring import Restored
from services.worker.sparse_prefixes import LoadedPrefix


def count_step(counters: Counters, outcome: Outcome) -> None:
    """Count what one step computed, and the bubble and loads before and beside it."""
    prefill, decoded = outcome.prefill_rows, outcome.decoded_tokens
    proposed, accepted = outcome.proposed_tokens, outcome.accepted_tokens
    counters.prefill_tokens_computed += prefill
    counters.decode_tokens += decoded
    counters.tokens_proposed += proposed
    counters.tokens_accepted += accepted
    metrics.STEP_SECONDS.observe(outcome.took_ns / 1e9)
    metrics.STEP_ROWS.observe(prefill + outcome.decode_rows)
    metrics.PREFILL_TOKENS.inc(prefill)
    metrics.DECODE_TOKENS.inc(decoded)
    metrics.PROPOSED_TOKENS.inc(proposed)
    metrics.ACCEPTED_TOKENS.inc(accepted)
    if outcome.loads is not None:
        _count_loads(counters, outcome.loads)
        counters.bubble_us += outcome.bubble.ns // 1000
        counters.bubble_tokens += outcome.bubble.tokens
        metrics.BUBBLE_SECONDS.inc(outcome.bubble.ns / 1e9)
        metrics.BUBBLE_TOKENS.inc(outcome.bubble.tokens)
    if outcome.restored.took_ns:
        _count_restored(counters, outcome.restored)
    counters.sparse_prefixes_refused += len(outcome.refused)
    metrics.SPARSE_REFUSED.inc(len(outcome.refused))
    for loaded in outcome.sparse:
        _count_sparse(counters, loaded)


def count_repeat(counters: Counters) -> None:
    """Count a pass that was thrown away and repeated."""
    counters.steps_repeated += 1
    metrics.STEPS_REPEATED.inc()


def count_promotion(counters: Counters, promoted: Promoted) -> None:
    """Count a promotion that is over."""
    if promoted.is_ok:
        counters.promotions_done += 1
        counters.pages_promoted += promoted.pages
        metrics.PROMOTED_PAGES.inc(promoted.pages)
    else:
        counters.promotions_failed += 1
        metrics.PROMOTIONS_FAILED.inc()
    metrics.PROMOTION_SECONDS.observe(max(0, promoted.ended_ns - promoted.started_ns) / 1e9)


def _count_restored(counters: Counters, restored: Restored) -> None:
    counters.tokens_restored += restored.rows
    counters.restore_us += restored.took_ns // 1000
    counters.restores_refused += len(restored.refused)
    metrics.RESTORED_TOKENS.inc(restored.rows)
    metrics.RESTORE_SECONDS.observe(restored.took_ns / 1e9)
    metrics.RESTORES_REFUSED.inc(len(restored.refused))


def _count_sparse(counters: Counters, loaded: LoadedPrefix) -> None:
    prefix, outcomes = loaded.prefix, loaded.prefix.outcomes
    counters.sparse_prefixes_loaded += 1
    counters.sparse_disk_bytes += loaded.event.disk_bytes
    counters.sparse_read_us += loaded.event.read_us
    counters.sparse_layers_fallen_back += prefix.layers_fallen_back
    metrics.SPARSE_LOADED.inc()
    for kind, nbytes in prefix.bytes_read.by_kind().items():
        metrics.SPARSE_BYTES.labels(kind).inc(nbytes)
    metrics.SPARSE_LAYERS.inc(len(outcomes))
    metrics.SPARSE_FALLBACKS.inc(prefix.layers_fallen_back)
    metrics.SPARSE_STALL_SECONDS.inc(loaded.prefix.stall_s)
    metrics.NEEDED_BYTES.inc(sum(outcome.needed_bytes for outcome in outcomes))


def count_saving(counters: Counters, saving: SavingCounts) -> None:
    """Count the rows that were taken since the last time, and the sequences that the ring had no room for."""
    rows, stopped = saving.rows - counters.hidden_rows_taken, saving.stopped_no_room - counters.hidden_ring_full
    if rows or stopped:
        counters.hidden_rows_taken += rows
        counters.hidden_ring_full += stopped
        metrics.HIDDEN_ROWS.inc(rows)
        metrics.HIDDEN_STOPPED.inc(stopped)


def count_saved(counters: Counters, saved: SavedHidden) -> None:
    """Count a hidden lease that is over."""
    counters.hidden_chunks_saved += saved.chunks
    counters.hidden_lease_full += saved.lacked_pages
    metrics.HIDDEN_CHUNKS_SAVED.inc(saved.chunks)
    metrics.HIDDEN_STOPPED.inc(saved.lacked_pages)


def _count_loads(counters: Counters, loads: LoadResult) -> None:
    counters.pages_loaded += loads.pages
    counters.load_bytes += loads.nbytes
    counters.loads_failed += len(loads.failures)
    counters.load_stall_us += loads.waited_ns // 1000
    metrics.LOAD_SECONDS.observe(loads.load_ns / 1e9)
    metrics.LOAD_BYTES.inc(loads.nbytes)
    metrics.LOADS_FAILED.inc(len(loads.failures))
    metrics.LOAD_STALL_SECONDS.inc(loads.waited_ns / 1e9)
