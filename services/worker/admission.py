"""From an ``AdmitRequest`` to a running request; every order that could hurt a step is refused here. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.answers import Answer, Growth
from services.worker.detokenizer import Vocabulary
from services.worker.requests import Milestones, RunningRequest
from services.worker.sparse_admission import sparse_fault
from services.worker.token_sequence import TokenSequence
from shared.errors import InvalidRequest
from shared.messages.worker_plans import AdmitRequest


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds of the model and its pool that requests are checked against."""

    page_size: int
    pages: int
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]


def admit(
    order: AdmitRequest, limits: ModelLimits, vocabulary: Vocabulary, *, admitted_ns: int
) -> tuple[RunningRequest, list[Growth]]:
    """Return the request, and the growth that each output token of its earlier attempts brought.

    ``order`` is self-contained. Raises InvalidRequest when the order contradicts itself or the model; it would break a
    step or, worse, make attention read KV that belongs to others.
    """
    tokens = np.frombuffer(order.tokens, dtype="<i4")
    pages = np.frombuffer(order.pages, dtype="<i4").astype(np.int32)
    fault = _fault(order, tokens, pages, limits)
    if fault:
        raise InvalidRequest(fault)
    answer = Answer(
        order.sampling,
        prompt_tokens=order.prompt_tokens,
        max_context=limits.max_context,
        eos_token_ids=limits.eos_token_ids,
        stream=vocabulary.stream(
            skip_special_tokens=order.sampling.skip_special_tokens, shown=order.sampling.shown_special_tokens
        ),
    )
    growths = answer.replay(tokens[order.prompt_tokens :].tolist())
    request = RunningRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        gateway_id=order.gateway_id,
        prompt_ids=tokens[: order.prompt_tokens],
        tokens=TokenSequence(tokens),
        pages=pages,
        page_size=limits.page_size,
        computed=order.cached_tokens,
        sampling=order.sampling,
        answer=answer,
        device_tokens=order.device_tokens,
        host_tokens=order.host_tokens,
        disk_tokens=order.disk_tokens,
        remote_tokens=order.remote_tokens,
        neighbour_tokens=order.neighbour_tokens,
        lent_tokens=order.lent_tokens,
        sparse=order.sparse,
        leases=order.leases,
        adapter=order.adapter,
        milestones=Milestones(received_ns=order.received_ns, accepted_ns=order.accepted_ns, admitted_ns=admitted_ns),
        lease_tokens=max(0, len(pages) * limits.page_size - len(tokens)),
    )
    return request, growths


def _fault(order: AdmitRequest, tokens: np.ndarray, pages: np.ndarray, limits: ModelLimits) -> str:
    if not 1 <= order.prompt_tokens <= len(tokens):
        return f"{order.prompt_tokens} prompt tokens of {len(tokens)} tokens"
    if len(tokens) > limits.max_context:
        return f"{len(tokens)} tokens exceed the context of {limits.max_context}"
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        return f"a token is outside the vocabulary of {limits.vocab_size}"
    if not 0 <= order.cached_tokens < len(tokens):
        return f"{order.cached_tokens} of {len(tokens)} tokens cannot be cached"
    lowest = 0 if order.sparse is None else -1
    if len(pages) and (pages.min() < lowest or pages.max() >= limits.pages):
        return f"a page is outside the pool of {limits.pages}"
    if len(pages) * limits.page_size < len(tokens):
        return f"{len(pages)} pages do not hold {len(tokens)} tokens"
    if order.adapter and (order.sparse is not None or order.hidden_lease is not None):
        return "KV of an adapter is neither read in part nor restored from hidden states"
    if order.sparse is not None:
        return sparse_fault(order, order.sparse, pages, limits.page_size, limits.pages)
    return ""
