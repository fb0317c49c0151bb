"""The administration of the cache, below /v1/cache.

Unknown fields are refused here: a flush that overlooks a misspelt ``namespace`` would drop everything.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.openai_schema.chat import ChatMessage
from services.gateway.openai_schema.errors import ErrorDetail
from services.gateway.openai_schema.models import Shortfall
from services.gateway.openai_schema.usage import PromptTokensDetails
from shared.text_patterns import END

MAX_PREWARMED = 64
MAX_TTL_S = 366 * 86_400
MAX_LISTED = 1024

Tier = Literal["device", "host", "disk", "remote"]
Namespace = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{32}}{END}")]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
TenantName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{1,64}}{END}")]
PinName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{1,64}}{END}")]


class PromptSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt as text, as a conversation or as token ids: exactly one of the three."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None  # Rendered into the prompt with ``messages``.
    cache_salt: Salt | None = None
    tenant: TenantName | None = None
    model: str | None = None  # The base model, or an adapter.


class PinRequest(PromptSource, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt to keep in host memory, and for how long."""

    ttl_s: Annotated[float, Meta(ge=0.001, le=MAX_TTL_S)] = 3600.0
    name: PinName | None = None


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned prefix: ``held_tokens`` of its ``tokens`` are in host memory now; more follow as copies are made."""

    object: str = "cache.pin"
    name: str
    namespace: str
    tokens: int
    held_tokens: int
    pages: int
    expires_at: float  # Unix seconds.
    refusal: str = ""  # Why the pin holds nothing, or empty.


class PinList(msgspec.Struct, frozen=True, kw_only=True):
    """All pins, those refused within the last minute included."""

    object: str = "list"
    data: list[Pin]


class PinDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The confirmation that a pin was released."""

    object: str = "cache.pin"
    name: str
    deleted: bool = True


class CacheLease(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that a tenant's request asked to keep. ``key`` is its ``prompt_cache_key``, "" without one."""

    object: str = "cache.lease"
    tenant: str
    namespace: str
    key: str
    tokens: int
    ttl_s: float
    expires_at: float  # Unix seconds.


class LeaseList(msgspec.Struct, frozen=True, kw_only=True):
    """Cache leases, at most 1,024."""

    object: str = "list"
    data: list[CacheLease]


class CacheNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the radix tree: a span of ``tokens`` tokens, ``depth`` tokens below the root.

    ``device`` and ``host`` count its pages by worker and by storage, ``disk`` the chunks that end in it by storage,
    and ``hidden`` the chunks with hidden states, from which KV is restored.
    """

    id: int
    parent: int | None
    namespace: str
    depth: int
    tokens: int
    hits: int
    head: list[int]  # Its first tokens, at most 16.
    head_text: str | None = None
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    hidden: dict[str, int]
    pins: list[str]


class CacheNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One page of nodes. Pass ``next_after`` as ``after`` for the next page; it is null at the end."""

    object: str = "list"
    data: list[CacheNode]
    has_more: bool
    next_after: int | None


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one pool; free + cached + leased = total."""

    owner: str
    tier: str
    total: int
    cached: int
    leased: int
    free: int
    form: str = ""  # For a hidden pool: layers computed from tokens / from hidden states / kept as KV, such as "0/8/0".


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and counters of the cache.

    ``storages`` has each storage's own counters, or null where it did not answer.
    """

    object: str = "cache.stats"
    page_size: int
    nodes: int
    pins: int
    pinned_pages: int
    cache_leases: int = 0
    leased_pages: int = 0
    chunks: int  # Chunks of KV on the disks, as far as the scheduler knows.
    hidden_chunks: int  # Chunks of hidden states, from which KV is restored.
    sparse_chunks: int = 0  # Those of ``chunks`` stored a second time, so that they can be read in part.
    pools: list[PoolReport]
    hit_tokens: dict[str, int]  # By tier.
    counters: dict[str, int]
    storages: dict[str, dict[str, int] | None]
    degraded: list[Shortfall] = []  # Configured features that processes of the cell lack.


class FlushRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiers to flush: everything on them, or one ``namespace``, or that of one ``cache_salt`` and one ``tenant``.

    ``responses``: erase the kept answers of /v1/responses as well, all of them where neither salt nor tenant is given.
    """

    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)] = ("device", "host")
    responses: bool = False
    namespace: Namespace | None = None
    cache_salt: Salt | None = None
    tenant: TenantName | None = None


class FlushReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of dropped pages and chunks. An object store is emptied in the background, and not counted."""

    object: str = "cache.flush"
    tiers: list[str]
    device_pages: int
    host_pages: int
    disk_chunks: int
    responses: int = 0


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chunks to check. ``cursor`` is the ``next_cursor`` of the answer before; without ``storage``, all storages'."""

    storage: str | None = None
    cursor: str = ""
    max_chunks: Annotated[int, Meta(ge=1, le=1024)] = 256


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of ``storage`` that were checked; ``next_cursor`` is null after the last of all."""

    object: str = "cache.verification"
    storage: str | None
    checked: int
    nbytes: int
    bad: list[str]
    next_cursor: str | None


class PrewarmRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts to bring into the cache. A string stands for ``{"prompt": string}``."""

    prompts: Annotated[list[str | PromptSource], Meta(min_length=1, max_length=MAX_PREWARMED)]


class PrewarmedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers on which a prompt was cached before; its whole pages are cached now, unless there is an ``error``."""

    index: int
    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    error: ErrorDetail | UnsetType = UNSET


class PrewarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each prompt, in order, and how many failed."""

    object: str = "cache.prewarm"
    data: list[PrewarmedPrompt]
    failed: int
