"""What a gateway makes of a client's request."""

from __future__ import annotations

from shared.ids import key_digest
from shared.messages.base import pack_int32
from shared.messages.requests import CacheHints, SamplingParams, SubmitRequest
from tests.simulation.scenario import Arrival
from tests.stateful.model_pages import namespace


def submission(arrival: Arrival, gateway_id: str) -> SubmitRequest:
    """The message of an arrival at this gateway."""
    return SubmitRequest(
        request_id=arrival.request_id,
        gateway_id=gateway_id,
        namespace=namespace(arrival.salt),
        prompt=pack_int32(arrival.prompt),
        sampling=SamplingParams(
            max_tokens=arrival.max_tokens,
            seed=arrival.seed,
            ignore_eos=arrival.ignore_eos,
            prompt_logprobs=1 if arrival.is_logged else None,
        ),
        tenant=arrival.tenant,
        priority=arrival.priority,
        deadline_ms=arrival.deadline_ms,
        cache=CacheHints(read=arrival.read, write=arrival.write, importance=arrival.importance),
        key_id=key_digest(arrival.salt),
    )
