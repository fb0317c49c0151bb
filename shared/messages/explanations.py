"""Explanations: the scheduler's answers when a gateway asks how recent requests were served, and why.

None of it is an input or an output of the core: it decides nothing, and no recording holds it.
"""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message

Source = Literal["device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "computed", "lent"]

Reason = Literal[
    "never_stored",  # No earlier use of these tokens is known.
    "evicted",  # It was cached, and has left the cell's memory.
    "not_admitted",  # It left the device, and host memory did not take it.
    "pending",  # Another request was computing or fetching it.
    "other_salt",  # It is cached in another namespace only.
    "other_fidelity",  # It was computed on top of a lossy prefix, and such KV is not cached.
    "deadline",  # The request waited for it until a deadline.
    "partial_chunk",  # It fills no whole page, and pages are reused whole.
    "last_token",  # The last token is always computed, and with it the page that it ends.
    "opted_out",  # The request reads no cache.
    "failed",  # Its stored copy failed verification.
    "elsewhere",  # Only devices that its worker does not reach hold it.
    "too_little",  # Too little to be worth a load.
    "unknown",  # It was cached, and how it left is forgotten.
]

Departure = Literal["evicted", "displaced", "refused", "flushed", "failed", "lost", "lossy"]
"""How KV left the cell's memory: a policy's victim; displaced by a promotion; refused a backup; flushed by an order;
failed a checksum; lost with its worker or storage; lossy and never kept."""


WayName = Literal["kv", "hidden", "recompute", "sparse"]

CostName = Literal[
    "queue",  # Reads of the disk for earlier fetches.
    "read",  # Reading KV or hidden states from the disk.
    "keys",  # Reading keys to choose tokens by, calls included.
    "chosen",  # Reading K and V of chosen tokens, calls included.
    "copies",  # Copying chosen tokens to the device.
    "load",  # Loading KV from host memory, verified.
    "restore",  # Restoring KV from hidden states on the device.
    "compute",  # Computing the rest of the prompt.
    "overlap",  # Below 0: time of the other parts that other work, or another part, hides.
]

PointKind = Literal[
    "diverged",  # The nearest cached path goes on with other tokens.
    "continued",  # It ends there: the rest is new, as in a conversation's next turn.
    "evicted",  # It went on with the same tokens, which have left the cell's memory.
    "new",  # No cached path of the namespace begins like the prompt.
    "opted_out",  # The request reads no cache.
]


class DivergencePoint(Message, frozen=True):
    """The place where a prompt leaves the nearest cached path, in tokens, at its request's admission.

    ``position`` is the first token that is not shared, ``page_start`` the first token of its page. ``before`` are the
    last tokens that both have, ``prompt`` and ``cached`` the first ones behind (packed int32). ``lost_tokens`` were
    computed although the cached path holds them behind its own tokens, or held them until they left; they took about
    ``lost_us`` at the measured speed, 0 where none was measured.
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
    """Tokens [start, end) of the caller's prompt, and the source of their KV.

    ``reason`` is why computed ones were computed. Where they are known to have left, ``departure`` says how, ``tier``
    from where last, ``policy`` by which eviction policy, and ``at_ns`` when (time of the inputs stream).
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
    """A time for which a waiting request was deferred, in nanoseconds of the inputs stream."""

    kind: Literal["deferral", "prefetch_wait"]
    start_ns: int
    end_ns: int


class CostPart(Message, frozen=True):
    """A part of a way's predicted time, in microseconds, and the bytes that it reads.

    ``took_us`` is the time for which computation waited for it; -1: not known.
    """

    name: CostName
    us: int
    nbytes: int = 0
    took_us: int = -1


class WeighedWay(Message, frozen=True):
    """A way to restore a request's prefix that was compared with others, and its predicted time in microseconds.

    The time is that from when the device comes to the request until its prompt is computed; its parts add up to it.
    """

    way: WayName
    us: int
    parts: tuple[CostPart, ...]
    is_taken: bool = False


class Admission(Message, frozen=True):
    """One attempt of a request: when and where it was admitted, after which waits, and its prompt's sources of KV."""

    request_id: str
    attempt: int
    worker_id: str
    accepted_ns: int
    admitted_ns: int
    waits: tuple[Wait, ...] = ()
    prompt: tuple[PromptSpan, ...] = ()
    point: DivergencePoint | None = None
    ways: tuple[WeighedWay, ...] = ()  # Ways to restore its prefix from below host memory, if several were compared.


class GetAdmissions(Message, frozen=True):
    """Call ``rpc.scheduler.admissions``; answered by Admissions.

    ``ended``: requests that the caller has seen end. The scheduler learns of an end from its own stream, perhaps
    later; its answer waits a moment for that, because a request's restored spans are complete only then.
    """

    request_ids: tuple[str, ...]
    ended: tuple[str, ...] = ()


class Admissions(Message, frozen=True):
    """The admissions still remembered, attempts of one request in order; forgotten requests have none."""

    admissions: tuple[Admission, ...] = ()


class CostlyPoint(Message, frozen=True):
    """A divergence point of several prompts, by the latest of them.

    ``lost_tokens`` may be up to ``error_tokens`` too many: points that were forgotten are counted with the point that
    replaced them.
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
    """The points that lost most tokens, the costliest first, since ``since_ns`` (time of the inputs stream)."""

    since_ns: int = 0
    points: tuple[CostlyPoint, ...] = ()
