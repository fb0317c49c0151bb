"""Every environment variable with our prefix that something reads, in one place.

A service knows its own settings alone, and a cell's processes share one environment. By this table each can tell a
variable that is meant for another from one that is read by none, such as a misspelt name or that of a removed setting.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache

from shared.renamed_settings import REMOVED, RENAMED
from shared.spelling import nearest

PREFIX = "THERMOCLINE_"

SUPERVISED = PREFIX + "SUPERVISED"
"""Set for processes whose starter reads the same environment."""

_SETTINGS = """
adapter adapter_bytes admin_key admission admission_frequency aging_requests answer_lookup_ms answer_memory_bytes
api_keys api_keys_file api_metrics attention backup_deadline_ms backup_share batches_ahead body_timeout_ms
bubble_filling bubble_prefill cell cell_ca cells check_invariants_every clock_bits connect_timeout_ms copies_at_rest
cors_origins cpu_dtype cpu_kv_bytes data_dir decode_graph_rows defer_deadline_ms defer_tokens depth_bits device
device_kv_bytes device_memory_fraction device_pages disk_dir disk_direct disk_kv_bytes disk_read_bytes_per_s
disk_writes drain_timeout_ms dtype eviction_expression exact fair_share fetch_deadline_ms fingerprint_bits
first_token_timeout_ms forward frequency_bits gpu grace_ms grace_s handover_bytes handover_ms head_timeout_ms
health_ms health_timeout_ms heartbeat_lost_ms hidden_bytes hidden_form hidden_ring_bytes host host_kv_bytes
host_tier host_writes hotness_expression id idle_timeout_ms importance importance_alpha importance_caching
importance_gate importance_key_ratios importance_probe_heads importance_ratio io_threads keep_responses keepalive_ms
keys known_text_bytes kv_dtype kv_gate lead_ms lease_low_tokens lease_tokens load_compute_ratio load_timeout_ms
log_level max_adapter_rank max_adapters max_attempts max_batch_tokens max_body_bytes max_buffered_bytes
max_connections max_context_tokens max_inflight max_leased_tokens max_priority max_queued max_queued_per_tenant
max_queued_tokens max_running max_saves max_transfers measure_at_start metrics_host metrics_port
min_host_load_tokens min_prefetch_tokens model most_heads mover mover_programs nats nats_ca nats_cert
nats_credentials nats_key nats_least_payload_bytes nats_password_file nats_pending_bytes nats_port nats_server
nats_server_name nats_token_file nats_user neighbour_loads node node_workers page_size pending_events pin_fraction
policy port prefetch_deadline_ms prefetch_fraction prefetch_keys prefetch_wait prefix_caching probe_ms profile
promotion promotion_tokens prompt_lookup_tokens queue_window rank_timeout_ms ready_timeout_s reasoning_parser remote
remote_timeout_ms request_timeout_ms reserve_fraction responses_max_age_s responses_max_bytes responses_max_count
restore_staging_bytes restoring retained_outputs save_deadline_ms schedule schedulers send_timeout_ms
served_model_name session_header share shm_prefix snapshot_every_inputs snapshot_every_ms sparse sparse_block_tokens
sparse_buffer_bytes special_tokens_in_content staging_bytes stop_timeout_ms stream_max_age_s stream_max_bytes
stream_replicas stream_start_ms summaries tenant_metrics tenants tensor_parallel threads tls_cert tls_key
tls_min_version tool_parser trace_share traces tries verify_host verify_host_share workers
"""
SETTINGS = tuple(_SETTINGS.split())
"""Settings of all sections, in order; a test compares them with the services' own."""

OTHERS = {
    "nats_password": "every process: the password of nats_user",
    "nats_token": "every process: a token in the place of user and password",
    "key_default": "storages: the key of chunks without a salt",
    "supervised": "processes that `thermocline up` starts, and cells of commands: the starter's process id",
    "progress_fd": "processes that `thermocline up` starts: the pipe for what they are doing",
    "api_key": "`thermocline cache`: a key of the gateway",
    "python": "./task: the interpreter",
    "torch": "./task: the build of PyTorch",
    "tag": "Compose: the tag of images",
}
"""Variables that are no settings, by name without the prefix: who reads them."""

_ORCHESTRATED = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Names that Kubernetes makes of the names of services."""


def is_known(variable: str) -> bool:
    """Return whether something reads ``variable``, by its present or by an old name."""
    name = variable.removeprefix(PREFIX).lower()
    return name in SETTINGS or name in OTHERS or name in RENAMED


def strangers(environ: Mapping[str, str], own: Collection[str] = ()) -> list[str]:
    """Return a line on each variable of a removed setting, and one on all that are read by nothing.

    ``own`` are settings that the caller knows besides those of the table. Only names in upper case count, and none that
    an orchestrator makes.
    """
    ours = [variable for variable in sorted(environ) if variable.startswith(PREFIX) and variable == variable.upper()]
    lines, unknown = [], []
    for variable in ours:
        name = variable.removeprefix(PREFIX).lower()
        removed = REMOVED.get(name)
        if removed is not None:
            lines.append(f"{variable} is ignored: it {removed.told}")
        elif name not in own and not is_known(variable) and not _ORCHESTRATED.search(variable):
            near = nearest(name.upper(), [each.upper() for each in SETTINGS], PREFIX)
            unknown.append(f"{variable} ({near.removeprefix('; ')})" if near else variable)
    if unknown:
        lines.append(f"these variables are ignored, because no setting has their name: {', '.join(unknown)}")
    return lines


@cache
def warn_of_strangers(program: str, own: tuple[str, ...] = ()) -> None:
    """Print the lines on this process's :func:`strangers` to stderr, once in its life."""
    for line in strangers(os.environ, own):
        print(f"{program}: {line}", file=sys.stderr)
