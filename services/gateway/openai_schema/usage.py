"""Usage, timing and prompt logprobs in responses."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.openai_schema.leases import CacheLeaseReport


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of a prompt. ``cached_tokens`` is OpenAI's field; the others give the hits by tier.

    ``disk_tokens`` and ``remote_tokens`` were fetched for this request from the disk and the object store,
    ``neighbour_tokens`` copied from another device of the node, ``lent_tokens`` read from another node,
    ``hidden_tokens`` restored from hidden states or a mix of them, KV and recomputation. Of ``sparse_tokens`` only the
    important ones were loaded. ``cache_write_tokens`` were not hits, and this request added their KV to the cache;
    those of a page that the prompt does not fill are added once the answer fills it.
    """

    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int = 0
    remote_tokens: int = 0
    neighbour_tokens: int = 0
    hidden_tokens: int = 0
    sparse_tokens: int = 0
    lent_tokens: int = 0
    cache_write_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the output: ``reasoning_tokens`` stand between the markers of reasoning."""

    reasoning_tokens: int = 0


class ImportanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of sparse prefixes that were loaded: sums over all choices, since each chose and read by itself.

    ``loaded_tokens`` of ``prefix_tokens`` were loaded in each layer. In ``layers_fallen_back`` of ``layers`` the probe
    heads disagreed and all keys were read.
    """

    ratio: float
    metric: str
    loaded_tokens: int
    prefix_tokens: int
    layers: int
    layers_fallen_back: int
    disk_bytes: int


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the request; a prompt counts once, however many choices it has.

    ``importance`` is null where every token of every choice is exact; ``cache_lease`` is absent where no lease was
    asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # Where the model reasons.
    importance: ImportanceReport | None = None
    cache_lease: CacheLeaseReport | UnsetType = UNSET


class TimingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of the first choice up to its first token; null is unknown.

    ``accept_ms``: from the complete HTTP request to its storage in the stream; ``admit_ms``: from there to its arrival
    at the worker; ``queue_ms``: to its first step; ``load_ms``: page loads; ``compute_ms``: the rest until the first
    token was sampled; ``first_token_ms``: all of it; ``total_ms``: until the gateway writes this.
    """

    accept_ms: float | None
    admit_ms: float | None
    queue_ms: float | None
    load_ms: float | None
    compute_ms: float | None
    first_token_ms: float | None
    total_ms: float | None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt token's logprob in vLLM's shape.

    ``rank`` is its place among all tokens, from 1; null where a worker of an earlier release answers and the
    token is unlikely.
    """

    logprob: float
    rank: int | None
    decoded_token: str
