"""Tokens from a worker to one gateway: one message per gateway and step. Subject ``tokens.<gateway_id>``."""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.worker_events import FinishReason
from shared.messages.worker_plans import LeaseGrant


class TokenLogprob(Message, frozen=True):
    """The logprob of one token and of the most likely ones at its place, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # Its place among all tokens, from 1, as ``top`` is ordered; 0: untold, as for tokens of an answer.


class Timing(Message, frozen=True):
    """Wall-clock times, in ns, of the events up to a request's first token. 0 is unknown."""

    received_ns: int = 0  # HTTP request complete at the gateway.
    accepted_ns: int = 0  # Stored in the stream.
    admitted_ns: int = 0  # AdmitRequest arrived at the worker.
    started_ns: int = 0  # The step of its first chunk began.
    loaded_ns: int = 0  # Its last page load ended; 0 without loads.
    first_token_ns: int = 0  # Its first token was sampled.
    restored_ns: int = 0  # The last chunk of its prompt was restored from hidden states; 0 without any.


class ImportanceUsage(Message, frozen=True):
    """The part of a sparse prefix that was loaded."""

    ratio: float
    metric: str
    loaded_tokens: int  # Tokens of the prefix, per layer.
    layers: int
    layers_fallen_back: int  # Probe heads disagreed there, and all keys were read.
    disk_bytes: int


class Usage(Message, frozen=True):
    """Sources of the KV of the caller's prompt tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    neighbour_tokens: int = 0
    hidden_tokens: int = 0  # Restored from hidden states, or from a mix of them, KV and recomputation.
    computed_tokens: int = 0  # Prefill tokens really computed for this attempt, preempted work included.
    sparse_tokens: int = 0  # Tokens of a sparse prefix: only the important ones among them were loaded.
    importance: ImportanceUsage | None = None  # None where nothing was loaded lossily.
    leases: tuple[LeaseGrant, ...] = ()  # One answer to each lease of the request.
    lent_tokens: int = 0  # Read from another node.


class TokenItem(Message, frozen=True):
    """New tokens of one request.

    ``index`` is the output position of the first; a gateway drops tokens that it has and asks the worker again
    (``rpc.worker.<id>.outputs``) for those it misses. ``text`` is the text that these tokens complete; it never ends
    inside a character, and it is withheld while it could be the beginning of a stop string, so it may be empty while
    tokens are not.
    """

    request_id: str
    attempt: int
    index: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # With the first item only.
    finish: FinishReason | None = None
    stop_match: str | int | None = None  # The stop string or token id that ended it.
    error: str = ""
    usage: Usage | None = None  # With the first and the last item.
    timing: Timing | None = None  # With the first item.


class TokenBatch(Message, frozen=True):
    """All output of one step for one gateway."""

    worker_id: str
    incarnation: str
    step: int
    items: tuple[TokenItem, ...]
