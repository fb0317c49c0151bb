"""Settings of one gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.config import NATS_URL
from shared.ids import is_valid_name

MIN_ADMIN_KEY = 16


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting with its default; ``--help`` prints the descriptions."""

    model: Annotated[str, Meta(description="model directory: config.json, tokenizer and weights", min_length=1)]
    nats: Annotated[tuple[str, ...], Meta(description="NATS servers, separated by commas")] = (NATS_URL,)
    id: Annotated[str, Meta(description="name of this gateway; each start adds a suffix of its own")] = "gateway-0"
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65_535)] = 8000
    served_model_name: Annotated[str, Meta(description="name in the API; by default the directory's")] = ""
    api_keys: Annotated[tuple[str, ...], Meta(description="accepted bearer keys for /v1; none means open")] = ()
    admin_key: Annotated[
        str, Meta(description="key that opens /v1/cache, the cache's administration; empty leaves it closed")
    ] = ""
    max_inflight: Annotated[int, Meta(description="choices in progress; beyond it clients get 429", ge=1)] = 1024
    max_body_bytes: Annotated[int, Meta(description="largest request body", ge=1024)] = 16 * 1024**2
    max_context_tokens: Annotated[int, Meta(description="context bound; 0 takes the model's own", ge=0)] = 0
    body_timeout_ms: Annotated[int, Meta(description="longest wait for a request body", ge=1)] = 30_000
    request_timeout_ms: Annotated[int, Meta(description="longest life of one request", ge=1)] = 1_800_000
    first_token_timeout_ms: Annotated[int, Meta(description="longest wait for a first token", ge=1)] = 600_000
    idle_timeout_ms: Annotated[int, Meta(description="longest pause between two tokens", ge=1)] = 120_000
    stream_start_ms: Annotated[
        int, Meta(description="a stream that has no token by then starts with its headers alone", ge=1)
    ] = 5_000
    keepalive_ms: Annotated[int, Meta(description="pause after which a stream carries an SSE comment", ge=1)] = 15_000
    send_timeout_ms: Annotated[int, Meta(description="longest wait for a client to take a chunk", ge=1)] = 60_000
    grace_ms: Annotated[int, Meta(description="time that running requests get after SIGTERM", ge=0)] = 30_000
    probe_ms: Annotated[int, Meta(description="pause after which a worker is asked for lost tokens", ge=1)] = 5_000
    threads: Annotated[int, Meta(description="threads that tokenise long prompts", ge=1, le=64)] = 2
    data_dir: Annotated[str, Meta(description="directory that keeps digests of weight files; empty is none")] = ""
    metrics_port: Annotated[int, Meta(description="second port for /metrics; 0 is off", ge=0, le=65_535)] = 0
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"

    def __post_init__(self) -> None:
        if not is_valid_name(self.id) or len(self.id) > 48:
            raise ValueError(f"--id {self.id!r} must be 1 to 48 letters, digits, - or _")
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError(f"--log-level {self.log_level!r} is not one of debug, info, warning, error")
        is_weak = len(self.admin_key) < MIN_ADMIN_KEY or not self.admin_key.isascii() or self.admin_key in self.api_keys
        if self.admin_key and is_weak:
            # The message must not hold the key: it goes to a terminal or a log.
            raise ValueError(f"--admin-key must have {MIN_ADMIN_KEY} ASCII characters or more, none of --api-keys")

    @property
    def model_dir(self) -> Path:
        return Path(self.model)

    @property
    def cache_dir(self) -> Path | None:
        """Where digests of weight files are kept."""
        return Path(self.data_dir) if self.data_dir else None
