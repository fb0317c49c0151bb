"""The worker's Prometheus metrics. Module level, because a registry takes each name once."""

from __future__ import annotations

from shared.metrics import counter, gauge, histogram

ROW_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)

STEP_SECONDS = histogram("worker_step_seconds", "Wall time of one step, loads and sampling included")
STEP_ROWS = histogram("worker_step_rows", "Tokens computed in one step", buckets=ROW_BUCKETS)
PREFILL_TOKENS = counter("worker_prefill_tokens", "Prompt tokens computed")
DECODE_TOKENS = counter("worker_decode_tokens", "Tokens computed by decode steps")
LOAD_SECONDS = histogram("worker_load_seconds", "Wall time of the host loads of one batch")
LOAD_BYTES = counter("worker_load_bytes", "KV bytes loaded from host pools")
LOADS_FAILED = counter("worker_loads_failed", "Page loads that failed verification, or had no pool")
LOAD_STALL_SECONDS = counter("worker_load_stall_seconds", "Time in which computation waited for a host load")
BUBBLE_SECONDS = counter("worker_bubble_seconds", "Time of decode steps that ran while a batch was only loading")
BUBBLE_TOKENS = counter("worker_bubble_tokens", "Tokens that these decode steps computed")
RESTORED_TOKENS = counter("worker_restored_tokens", "Tokens whose KV was restored from state pages")
RESTORE_SECONDS = histogram("worker_restore_seconds", "Wall time of the restorations of one batch")
RESTORES_REFUSED = counter("worker_restores_refused", "Restorations whose state pages could not be used")
PROMOTION_SECONDS = histogram("worker_promotion_seconds", "From the first copied page of a promotion to the last")
PROMOTED_PAGES = counter("worker_promoted_pages", "Pages copied to the device ahead of demand")
PROMOTIONS_FAILED = counter("worker_promotions_failed", "Promotions that brought no page")
STEPS_REPEATED = counter("worker_steps_repeated", "Forward passes thrown away because a load or request failed")
STATE_ROWS = counter("worker_state_rows", "Tokens whose state was taken down within their step, to be saved")
STATE_CHUNKS_SAVED = counter("worker_state_chunks_saved", "Chunks of state written to leased pages and sealed")
STATE_STOPPED = counter("worker_state_stopped", "Sequences whose state was saved no further for lack of room")
RUNNING = gauge("worker_running_requests", "Requests known to the worker")
QUEUED_ORDERS = gauge("worker_queued_orders", "Orders that wait for the compute thread")
PENDING_EVENTS = gauge("worker_pending_events", "Events that wait to be stored in the inputs stream")
TOKEN_MESSAGES = counter("worker_token_messages", "Token messages sent to gateways")
TOKEN_MESSAGES_DROPPED = counter("worker_token_messages_dropped", "Token messages lost; gateways ask for them")
PLAN_SECONDS = histogram("worker_plan_delay_seconds", "From the scheduler's publishing a plan to its arrival here")
PLANS_FETCHED = counter("worker_plans_fetched", "Plans read from the stream because they had been missed")
