"""Settings of one gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.listening import ListeningSettings
from services.gateway.openai_schema.sampling import MAX_PRIORITY
from services.gateway.replies.formats import reasoning_fault
from shared.ids import is_valid_name
from shared.importance import LEAST_RATIO, PROBE_HEADS
from shared.loopback import without_brackets
from shared.messages.pools import KvDtype
from shared.model_folder import find_model
from shared.quality_gate import UNMEASURED
from shared.tracing import Traces

ImportanceMode = Literal["off", "gated", "on"]


class GatewayConfig(ListeningSettings, frozen=True, kw_only=True):
    """All settings of a gateway with their defaults; ``--help`` prints the descriptions."""

    model: Annotated[str, Meta(description="model directory: config.json, tokenizer and weights", min_length=1)]
    id: Annotated[str, Meta(description="name of this gateway; each start adds a suffix of its own")] = "gateway-0"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65_535)] = 8000
    cell: Annotated[
        str, Meta(description="name of this cell; routers are sent its heads and load under it; empty sends none")
    ] = ""
    served_model_name: Annotated[str, Meta(description="name in the API; by default the directory's")] = ""
    adapter: Annotated[
        tuple[str, ...], Meta(description="NAME=DIR: a LoRA adapter to load at the start; several: again, or by commas")
    ] = ()
    api_keys: Annotated[tuple[str, ...], Meta(description="accepted bearer keys for /v1; none means open")] = ()
    api_keys_file: Annotated[
        str, Meta(description="file with further such keys, one a line, which no process list shows")
    ] = ""
    tenants: Annotated[
        str, Meta(description="TOML file of tenants: their keys, limits and salts; thermocline keys writes it")
    ] = ""
    max_priority: Annotated[
        int, Meta(description="highest priority that callers without a tenant may ask for", ge=0, le=MAX_PRIORITY)
    ] = 0
    max_leased_tokens: Annotated[
        int, Meta(description="tokens that callers without a tenant may keep by leases, per key", ge=0)
    ] = 262_144
    tenant_metrics: Annotated[
        bool, Meta(description="name tenants in /metrics; otherwise they are counted together as other")
    ] = False
    admin_key: Annotated[
        str, Meta(description="key that opens the administration, /v1/cache and /v1/cell; empty leaves it closed")
    ] = ""
    importance: Annotated[
        ImportanceMode,
        Meta(description="whether requests may load prefixes in part, which is lossy; gated: within the quality gate"),
    ] = "off"
    importance_gate: Annotated[
        str, Meta(description="quality gate of this model, made by thermocline eval; required by gated")
    ] = ""
    importance_ratio: Annotated[
        float, Meta(description="share of a prefix that is loaded where a request says nothing; 0 is exact", ge=0, le=1)
    ] = 0.0
    importance_key_ratios: Annotated[
        tuple[str, ...], Meta(description="KEY=RATIO: the same for single API keys, separated by commas")
    ] = ()
    importance_probe_heads: Annotated[
        int, Meta(description="as for the workers: the gate must have been measured with this number", ge=1)
    ] = PROBE_HEADS
    importance_alpha: Annotated[
        float, Meta(description="as for the workers: the gate must have been measured with this value", ge=0)
    ] = 0.6
    kv_dtype: Annotated[
        KvDtype, Meta(description="as for the workers: KV of eight bits is kept apart, and needs kv_gate")
    ] = "auto"
    kv_gate: Annotated[
        str,
        Meta(
            description="quality gate of this model with KV of eight bits, made by thermocline eval --kv-dtype fp8; "
            "unmeasured serves without one"
        ),
    ] = ""
    keep_responses: Annotated[
        bool,
        Meta(
            description="keep answers of /v1/responses and threads of /v1/messages in the cell, so that later requests "
            "can continue them"
        ),
    ] = True
    max_inflight: Annotated[int, Meta(description="choices in progress; beyond it clients get 429", ge=1)] = 1024
    special_tokens_in_content: Annotated[
        Literal["tokens", "text"],
        Meta(description="how special tokens in callers' messages are read; text keeps roles strictly apart"),
    ] = "tokens"
    tool_parser: Annotated[
        Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "json", "none"],
        Meta(description="format of tool calls in answers; auto: the one that the chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="marks of reasoning in answers: think, deepseek_r1, none, two marks with a comma between them; "
            "auto: those of the chat template"
        ),
    ] = "auto"
    answer_memory_bytes: Annotated[
        int,
        Meta(
            description="memory for answers' token ids, from which later turns are built; 0 tokenises answers again",
            ge=0,
        ),
    ] = 64 * 2**20
    known_text_bytes: Annotated[
        int, Meta(description="memory for tokens of known texts, which are not tokenised again; 0 keeps none", ge=0)
    ] = 64 * 2**20
    answer_lookup_ms: Annotated[
        int,
        Meta(
            description="longest wait for answers that other gateways, or earlier lives, remember; 0 shares none", ge=0
        ),
    ] = 50
    max_context_tokens: Annotated[int, Meta(description="context bound; 0 takes the model's own", ge=0)] = 0
    exact: Annotated[bool, Meta(description="as for the workers: KV of exact mode is kept apart")] = False
    first_token_timeout_ms: Annotated[int, Meta(description="longest wait for a first token", ge=1)] = 600_000
    idle_timeout_ms: Annotated[int, Meta(description="longest pause between two tokens", ge=1)] = 120_000
    stream_start_ms: Annotated[
        int, Meta(description="wait for a first token after which a stream starts with its headers alone", ge=1)
    ] = 5_000
    keepalive_ms: Annotated[int, Meta(description="pause after which a stream carries blank lines", ge=1)] = 15_000
    probe_ms: Annotated[int, Meta(description="pause after which a worker is asked for lost tokens", ge=1)] = 5_000
    threads: Annotated[int, Meta(description="threads that tokenise long prompts", ge=1, le=64)] = 2
    data_dir: Annotated[str, Meta(description="directory that keeps digests of weight files; empty is none")] = ""
    traces: Traces = ""
    trace_share: Annotated[
        float, Meta(description="share of requests to trace, where the caller sends no traceparent", ge=0, le=1)
    ] = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError that names every fault of the settings."""
        msgspec.structs.force_setattr(self, "host", without_brackets(self.host))
        faults = [*self._importance_faults(), *self._kv_faults()]
        if not self.host:
            faults.append("--host is empty; 0.0.0.0 listens on every address of this machine")
        faults += self.listening_faults(name=self.id, longest=48, admin_key=self.admin_key, api_keys=self.api_keys)
        if fault := reasoning_fault(self.reasoning_parser):
            faults.append(fault)
        if self.cell and not is_valid_name(self.cell):
            faults.append(f"--cell {self.cell!r} must be 1 to 64 letters, digits, - or _")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def model_dir(self) -> Path:
        """The model's folder. Raises ConfigError where there is none."""
        return find_model(self.model)

    @property
    def cache_dir(self) -> Path | None:
        """Folder that keeps digests of weight files, or None."""
        return Path(self.data_dir) if self.data_dir else None

    @property
    def ratio_by_key(self) -> dict[str, float]:
        """Default ratios of single API keys, checked at construction."""
        pairs = (entry.rpartition("=") for entry in self.importance_key_ratios)
        return {key: float(ratio) for key, _, ratio in pairs}

    def _importance_faults(self) -> list[str]:
        faults = []
        if (self.importance == "gated") != bool(self.importance_gate):
            faults.append("--importance gated and --importance-gate FILE need each other")
        if self.importance == "off" and (self.importance_ratio or self.importance_key_ratios):
            faults.append("--importance-ratio and --importance-key-ratios need --importance gated (or on)")
        if not _is_ratio(self.importance_ratio):
            faults.append(f"--importance-ratio must be 0 or at least {LEAST_RATIO}")
        keys = []
        for place, entry in enumerate(self.importance_key_ratios, 1):
            # Messages say which entry, since they must not hold a key: they go to a terminal or a log.
            key, _, ratio = entry.rpartition("=")
            keys.append(key)
            if key not in self.api_keys:
                faults.append(f"--importance-key-ratios: entry {place} is no KEY=RATIO of one of --api-keys")
            elif not _is_ratio(_number(ratio)):
                faults.append(f"--importance-key-ratios: the ratio of entry {place} must be 0, or {LEAST_RATIO} to 1")
        if len(set(keys)) < len(keys):
            faults.append("--importance-key-ratios names a key twice")
        return faults

    def _kv_faults(self) -> list[str]:
        if self.kv_dtype == "auto":
            return ["--kv-gate needs --kv-dtype fp8"] if self.kv_gate else []
        faults = []
        if not self.kv_gate:
            faults.append(
                "--kv-dtype fp8 rounds KV, which is lossy: give --kv-gate FILE, measured with this model, or "
                f"--kv-gate {UNMEASURED} to serve without a measurement"
            )
        if self.importance != "off":
            faults.append(
                f"--importance {self.importance}: KV of eight bits cannot be loaded in part, so not with --kv-dtype fp8"
            )
        return faults


def _is_ratio(ratio: float) -> bool:
    return ratio == 0 or LEAST_RATIO <= ratio <= 1


def _number(text: str) -> float:
    """Return ``text`` as a number, or -1, which is no ratio, where it is none."""
    try:
        return float(text)
    except ValueError:
        return -1.0
