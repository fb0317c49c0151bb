"""The scheduler's notices to one gateway. Subject family ``out.gateway.<id>``."""

from __future__ import annotations

from shared.messages.base import Message

TENANTS_BOUND = "the queue is full: its tenant may have"
CELLS_BOUND_OF_TENANTS = "the queue is full: max_queued_per_tenant allows"
"""Beginnings of the messages of a ``queue_full`` for a bound on one tenant's waiting requests, while the cell has room.

They are part of recordings, as the code is, and gateways know such a refusal by them; so they never change.
"""


class RequestFailed(Message, frozen=True):
    """The request ended without a worker finishing it: refused, timed out in the queue, or out of attempts.

    ``code`` is a stable code of ``shared.errors`` (queue_full, deadline_exceeded, context_too_long,
    cancelled, no_capacity, attempts_exhausted, duplicate_request).
    """

    request_id: str
    code: str
    message: str
    retry_after_ms: int = 0


class ResumeNeeded(Message, frozen=True):
    """The worker of this request died, or the request was reclaimed. Answer with ``ResumeRequest`` for ``attempt``."""

    request_id: str
    attempt: int


class PromptWanted(Message, frozen=True):
    """The scheduler does not hold the base of this request (any more), and has forgotten the request.

    Answer with the same ``SubmitRequest`` and its whole prompt.
    """

    request_id: str


GatewayWord = RequestFailed | ResumeNeeded | PromptWanted


class GatewayNotice(Message, frozen=True):
    """Envelope of a notice. ``number`` counts from 1 for each gateway_id."""

    gateway_id: str
    number: int
    epoch: int
    cause: int
    word: GatewayWord
