"""Why a request was served as it was: what the scheduler answers when a gateway asks about requests of late.

None of it is an input or an output of the core: it decides nothing, and no recording holds it.
"""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message

Source = Literal["device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "computed", "lent"]

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


PointKind = Literal[
    "diverged",  # The nearest cached path goes on with other tokens.
    "continued",  # It ends there: what follows is new, as in the next turn of a conversation.
    "evicted",  # It went on with the same tokens, and they have left.
    "new",  # No cached path of the namespace begins like the prompt.
    "opted_out",  # The request reads no cache.
]


class DivergencePoint(Message, frozen=True):
    """Where a prompt leaves the nearest cached path, in tokens, as it was when the request was admitted.

    ``position`` is the first token that is not shared, ``page_start`` the first token of its page. ``before`` are the
    last tokens that both have, ``prompt`` and ``cached`` the first ones behind (packed int32). ``lost_tokens`` were
    computed although the cached path holds them behind its own tokens, or held them until they left; they took about
    ``lost_us`` at the speed that was measured, 0 where none was.
    """

    kind: PointKind
    position: int = 0
    page_start: int = 0
    page_size: int = 0
    before: bytes = b""
    prompt: bytes = b""
    cached: bytes = b""
    lost_tokens: int = 0
    lost_us: int = 0


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
    point: DivergencePoint | None = None


class GetAdmissions(Message, frozen=True):
    """Call ``rpc.scheduler.admissions``; answered by Admissions.

    ``ended``: those of them that the caller has seen end. The scheduler learns of an end from its own stream, perhaps
    later; its answer waits a moment for that, because what was restored for a request is complete only then.
    """

    request_ids: tuple[str, ...]
    ended: tuple[str, ...] = ()


class Admissions(Message, frozen=True):
    """What is still remembered of them, attempts of one request in order; forgotten requests have none."""

    admissions: tuple[Admission, ...] = ()


class CostlyPoint(Message, frozen=True):
    """A divergence point at which several prompts left the cache, by the latest of them.

    ``lost_tokens`` may be up to ``error_tokens`` too many: points that were forgotten are counted with the point that
    took their place.
    """

    namespace: str
    point: DivergencePoint
    requests: int
    lost_tokens: int
    lost_us: int
    error_tokens: int
    request_id: str
    at_ns: int


class GetDivergences(Message, frozen=True):
    """Call ``rpc.scheduler.divergences``; answered by Divergences."""

    most: int = 10


class Divergences(Message, frozen=True):
    """The points that lost most tokens, the costliest first, since the time ``since_ns`` of the inputs stream."""

    since_ns: int = 0
    points: tuple[CostlyPoint, ...] = ()
