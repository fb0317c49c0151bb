"""Messages from gateways to the scheduler. Subject family ``in.request``."""

from __future__ import annotations

from typing import Literal

from shared.compact_tokens import count_compact
from shared.importance import DEFAULT_METRIC, PROBE_HEADS
from shared.messages.base import Message, count_int32

MAX_GRAMMAR_BYTES = 65_536
"""Bytes of a grammar's text at most, in UTF-8."""


class Grammar(Message, frozen=True):
    """Rules for an answer's text, from its first token to its end. The gateway has checked that they compile.

    ``text`` is a JSON schema, a regular expression, or a grammar in the Lark dialect of llguidance, in which special
    tokens are written by name.

    ``scope`` names the callers that share compiled grammars, because they share a cache; to others a faster answer
    would show that a grammar was used before. "" is all callers without a salt.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    scope: str = ""


class SamplingParams(Message, frozen=True):
    """How to choose tokens. Values are already validated by the gateway; defaults mean "off"."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # The gateway draws one where the caller gave none, so that a resumed request continues alike.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # Keep the matched stop string in the text.
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()  # Special tokens that stay in the text although others are left out.
    logprobs: int | None = None  # None: none. k: the chosen token's logprob and the k most likely.
    prompt_logprobs: int | None = None  # Same for prompt tokens; such a request never reads the cache.
    grammar: Grammar | None = None  # None: any text.


class Importance(Message, frozen=True):
    """The part of a prefix that may be loaded: lossy, so only where the caller or the deployment chose it.

    Of every layer ``ratio`` of the prefix tokens, by ``metric`` (``shared.importance``; IMPRESS 4.1), among them
    ``first_tokens`` and ``recent_tokens`` in any case, as far as the ratio goes.
    """

    ratio: float  # Above 0, at most 1.
    metric: str = DEFAULT_METRIC
    first_tokens: int = 0
    recent_tokens: int = 0
    probe_heads: int = PROBE_HEADS  # Probe heads of the cell's workers, for the cost of such reads.


class Lease(Message, frozen=True):
    """A prefix of the prompt to be kept for a time, within the tenant's budget.

    With a ``key`` it replaces the tenant's last lease of that key in the namespace.
    """

    tokens: int  # Tokens of the prompt, from its start.
    ttl_ms: int  # From the request's admission, and again from each use.
    key: str = ""
    with_answer: bool = False  # The answer's tokens, too, as far as the budget goes.


class CacheHints(Message, frozen=True):
    """Per-request use of the prefix cache; the ``cache`` extension field of the HTTP API.

    Without ``importance``, fidelity is exact.
    """

    read: bool = True
    write: bool = True
    importance: Importance | None = None
    leases: tuple[Lease, ...] = ()
    max_leased_tokens: int = 0  # Budget of its tenant's leases in the cell; 0 grants none.
    returns_in_ms: int = 0  # Time from the answer to the session's next request; 0: unknown.


class CacheQuota(Message, frozen=True):
    """Bytes that KV of one owner may take in each device, host pool and disk, and in the object store. 0 is no bound.

    The owner is a tenant's salt, named by its digest (``shared.ids.key_digest``): tenants of one salt have one cache,
    and one quota.
    """

    owner: str
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0


class PromptBase(Message, frozen=True):
    """The first ``tokens`` tokens of a prompt, which the receiver has: whole blocks, by the digest of the last one.

    ``shared.prompt_chain`` computes the digests.
    """

    digest: bytes  # 16 bytes
    tokens: int


class SubmitRequest(Message, frozen=True):
    """A validated, tokenised request. ``prompt`` is packed int32, at least one token.

    With a ``base`` the scheduler has the front of the prompt, and ``tail`` is the rest: packed, at least one token.
    ``prompt`` is empty then, so that a scheduler that knows no bases refuses the request and computes no other prompt.

    For a scheduler that takes compact forms, ``compact`` has the prompt, or the tail behind a base, and both of them
    are empty (``shared.compact_messages``).
    """

    request_id: str
    gateway_id: str
    namespace: str  # hex digest of (model fingerprint, adapter, tenant salt, fidelity)
    prompt: bytes
    sampling: SamplingParams
    tenant: str = ""
    max_queued: int = 0  # Waiting requests that its tenant may have; 0 is the cell's own bound.
    trace: str = ""  # ``traceparent`` of the HTTP request's span; "" is not traced. It decides nothing.
    priority: int = 0
    deadline_ms: int = 0  # After acceptance; 0 is none.
    cache: CacheHints = CacheHints()
    key_id: str = ""  # Digest of the caller's cache salt (``shared.ids.key_digest``); "" without one.
    received_ns: int = 0  # The gateway's wall clock when the HTTP request was complete; for tracing only.
    quota: CacheQuota | None = None  # Quota of the namespace's owner, from now on; None is no bound.
    base: PromptBase | None = None
    tail: bytes = b""
    compact: bytes = b""
    adapter: str = ""  # Digest of the LoRA adapter, 32 hex digits; "" is the base model.

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the whole prompt, in whichever form it comes, its base included."""
        told = count_compact(self.compact) if self.compact else 0
        if self.base is not None:
            return self.base.tokens + count_int32(self.tail) + told
        return count_int32(self.prompt) + told


class ReclaimRequest(Message, frozen=True):
    """A gateway misses the rest of an answer, and neither a worker nor the scheduler knows the request.

    The last report of it was lost with its worker. The request begins again behind the tokens that the gateway has: the
    scheduler answers with ``ResumeNeeded``, unless it knows the request after all.
    """

    submit: SubmitRequest  # As before, with the rest of ``deadline_ms``.


class CancelRequest(Message, frozen=True):
    """The client went away or asked to stop."""

    request_id: str
    gateway_id: str
    reason: str = "client_disconnected"


class ResumeRequest(Message, frozen=True):
    """Answer to ``ResumeNeeded``: the tokens that the gateway has already received for this request.

    ``attempt`` is the attempt that is to start; tokens of earlier attempts that arrive later are dropped.
    """

    request_id: str
    gateway_id: str
    attempt: int
    output: bytes = b""


RequestInput = SubmitRequest | ReclaimRequest | CancelRequest | ResumeRequest
"""Messages that gateways put into the stream."""
