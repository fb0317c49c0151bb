"""Why a request was served as it was: what the scheduler answers when a gateway asks about requests of late.

None of it is an input or an output of the core: it decides nothing, and no recording holds it.
"""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message

Source = Literal["device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "computed"]

Reason = Literal[
    "never_stored",  # Nothing is known of it.
    "evicted",  # It was cached, and left.
    "not_admitted",  # It left the device, and host memory did not take it.
    "pending",  # Another was computing or bringing it.
    "other_salt",  # It is cached in another namespace only.
    "other_fidelity",  # It was computed on top of a lossy prefix, and such KV is not cached.
    "deadline",  # It was waited for until the time was over.
    "partial_chunk",  # It fills no whole page, and pages are reused whole.
    "last_token",  # The last token is always computed, and with it the page that it ends.
    "opted_out",  # The request reads no cache.
    "failed",  # What was kept of it failed verification.
    "elsewhere",  # Only devices that its worker does not reach hold it.
    "too_little",  # Less than is worth a load.
    "unknown",  # It was cached, and how it left is forgotten.
]

Departure = Literal["evicted", "displaced", "refused", "flushed", "failed", "lost", "lossy"]
"""How KV left the cell's memory: named by a policy; for a promotion; refused a backup; by an order; by a bad checksum;
with its worker or storage; never kept, because it was lossy."""


class PromptSpan(Message, frozen=True):
    """Tokens [start, end) of the caller's prompt, and where their KV came from.

    ``reason`` says of computed ones why. Where they are known to have left, ``departure`` says how, ``tier`` from where
    last, ``policy`` by which eviction policy, and ``at_ns`` when (time of the inputs stream).
    """

    start: int
    end: int
    source: Source
    reason: Reason | Literal[""] = ""
    departure: Departure | Literal[""] = ""
    tier: str = ""
    policy: str = ""
    at_ns: int = 0


class Wait(Message, frozen=True):
    """A time in which a waiting request stood aside, in nanoseconds of the inputs stream."""

    kind: Literal["deferral", "prefetch_wait"]
    start_ns: int
    end_ns: int


class Admission(Message, frozen=True):
    """One attempt of a request, as it was admitted: when, where, after which waits, and what its prompt was made of."""

    request_id: str
    attempt: int
    worker_id: str
    accepted_ns: int
    admitted_ns: int
    waits: tuple[Wait, ...] = ()
    prompt: tuple[PromptSpan, ...] = ()


class GetAdmissions(Message, frozen=True):
    """Call ``rpc.scheduler.admissions``; answered by Admissions.

    ``ended``: those of them that the caller has seen end. The scheduler learns of an end from its own stream, perhaps
    later; its answer waits for that for a moment, because what was restored for a request is complete only then.
    """

    request_ids: tuple[str, ...]
    ended: tuple[str, ...] = ()


class Admissions(Message, frozen=True):
    """What is still remembered of them, attempts of one request in order; forgotten requests have none."""

    admissions: tuple[Admission, ...] = ()
