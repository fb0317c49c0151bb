"""The worker's Prometheus metrics. Module level, because a registry takes each name once."""

from __future__ import annotations

from shared.metrics import counter, gauge, histogram

ROW_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)

STEP_SECONDS = histogram("worker_step_seconds", "Wall time of one step, loads and sampling included")
STEP_ROWS = histogram("worker_step_rows", "Tokens computed in one step", buckets=ROW_BUCKETS)
PREFILL_TOKENS = counter("worker_prefill_tokens", "Prompt tokens computed")
DECODE_TOKENS = counter("worker_decode_tokens", "Tokens of answers that decode steps have brought")
PROPOSED_TOKENS = counter("worker_proposed_tokens", "Tokens that prompt lookup proposed, each a row of a decode step")
ACCEPTED_TOKENS = counter("worker_accepted_tokens", "Proposed tokens that the model chose; the others were rejected")
LOAD_SECONDS = histogram("worker_load_seconds", "Wall time of the host loads of one batch")
LOAD_BYTES = counter("worker_load_bytes", "KV bytes loaded from host pools")
LOADS_FAILED = counter("worker_loads_failed", "Page loads that failed verification, or had no pool")
LOAD_STALL_SECONDS = counter("worker_load_stall_seconds", "Time in which computation waited for a host load")
BUBBLE_SECONDS = counter("worker_bubble_seconds", "Time of decode steps that ran while a batch was only loading")
BUBBLE_TOKENS = counter("worker_bubble_tokens", "Tokens that decode steps computed while a batch was only loading")
RESTORED_TOKENS = counter("worker_restored_tokens", "Tokens whose KV was restored from hidden pages")
RESTORE_SECONDS = histogram("worker_restore_seconds", "Wall time of the restorations of one batch")
RESTORES_REFUSED = counter("worker_restores_refused", "Restorations whose hidden pages could not be used")
SPARSE_LOADED = counter("worker_sparse_prefixes_loaded", "Sparse prefixes whose layers have all been chosen and read")
SPARSE_REFUSED = counter("worker_sparse_prefixes_refused", "Sparse prefixes that could not be read")
SPARSE_BYTES = counter("worker_sparse_bytes", "KV bytes of sparse prefixes that were read, by purpose", ("kind",))
SPARSE_LAYERS = counter("worker_sparse_layers", "Layers of sparse prefixes whose tokens were chosen")
SPARSE_FALLBACKS = counter("worker_sparse_layers_fallen_back", "Layers of sparse prefixes whose probe heads disagreed")
SPARSE_STALL_SECONDS = counter("worker_sparse_stall_seconds", "Time in which computation waited for sparse prefixes")
NEEDED_BYTES = counter("worker_sparse_needed_bytes", "K and V of sparse prefixes that layers attended over")
PROMOTION_SECONDS = histogram("worker_promotion_seconds", "From the first copied page of a promotion to the last")
PROMOTED_PAGES = counter("worker_promoted_pages", "Pages copied to the device ahead of demand")
PROMOTIONS_FAILED = counter("worker_promotions_failed", "Promotions that brought no page")
STEPS_REPEATED = counter("worker_steps_repeated", "Forward passes thrown away because a load or request failed")
STEPS_AHEAD = counter("worker_steps_ahead", "Decode steps launched before the tokens of the step before were read")
TOKENS_DISCARDED = counter(
    "worker_tokens_discarded", "Tokens that steps launched ahead computed behind the end of an answer"
)
HIDDEN_ROWS = counter("worker_hidden_rows", "Tokens whose hidden states were taken down within their step, to be saved")
HIDDEN_CHUNKS_SAVED = counter("worker_hidden_chunks_saved", "Hidden chunks written to leased pages and sealed")
HIDDEN_STOPPED = counter("worker_hidden_stopped", "Sequences whose hidden states were saved in part for lack of room")
RUNNING = gauge("worker_running_requests", "Requests known to the worker")
DRAINING = gauge(
    "worker_draining", "1 while the worker drains: it gets no new requests, and its hot prefixes are copied elsewhere"
)
QUEUED_ORDERS = gauge("worker_queued_orders", "Orders that wait for the compute thread")
PENDING_EVENTS = gauge("worker_pending_events", "Events that wait to be stored in the inputs stream")
TOKEN_MESSAGES = counter("worker_token_messages", "Token messages sent to gateways")
TOKEN_MESSAGES_DROPPED = counter("worker_token_messages_dropped", "Token messages lost; gateways ask for them")
PLAN_SECONDS = histogram("worker_plan_delay_seconds", "From the scheduler's publishing a plan to its arrival here")
PLANS_FETCHED = counter("worker_plans_fetched", "Plans read from the stream because they had been missed")
GPU_PART_WAYS = gauge("worker_gpu_part_ways", "1 for the way by which a part of CUDA serves, else 0", ("part", "way"))
GPU_PART_FAILURES = counter(
    "worker_gpu_part_failures", "Ways of parts of CUDA that did not pass their proof", ("part", "way")
)
