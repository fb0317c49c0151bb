"""The core's memory for explanations: spans that left the cell's memory and how, and recent admissions.

It decides nothing, so no snapshot holds it (:mod:`snapshot`): a restarted scheduler answers that it does not know. All
of it is bounded, and the oldest is forgotten first.

A departed node is kept as the tokens of its span, under its digest, so that later the very tokens decide how much of a
prompt it was (:mod:`misses`). The bytes of its label are the node's own: keeping them costs no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.labels import tokens_of
from shared.ids import TOKEN_BYTES
from shared.messages.explanations import Admission, CostlyPoint, Departure, DivergencePoint, Wait, WeighedWay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.scheduler.core.cache.prefix_tree import Node

MOST_DEPARTED = 8192
MOST_DEPARTED_BYTES = 16 * 2**20
MOST_ADMISSIONS = 1024
MOST_ATTEMPTS = 4
MOST_WAITS = 32
MOST_POINTS = 64
POINT_TOKENS = 16
"""Tokens before its page that identify a divergence point, with namespace and depth."""

PointKey = tuple[str, int, bytes]


class Departed(msgspec.Struct, frozen=True, gc=False):
    """A span that was cached: its tokens as a node's label, and how, from where, by which policy and when it left."""

    label: bytes
    departure: Departure
    tier: str
    policy: str
    at_ns: int
    is_wide: bool = True

    @property
    def tokens(self) -> bytes:
        """Tokens of the span, packed int32."""
        return tokens_of(self.label, 0, len(self.label), is_wide=self.is_wide)


class Recollection(msgspec.Struct):
    """Departed spans and admissions; ``is_whole`` while no departure since the very first input was forgotten."""

    # By the digest of a node, oldest first. To find the oldest, a plain dictionary steps over all that were removed.
    departed: OrderedDict[int, Departed] = msgspec.field(default_factory=OrderedDict)
    departed_bytes: int = 0
    admissions: dict[str, list[Admission]] = {}  # By request, its attempts in order; oldest request first.
    waits: dict[str, list[Wait]] = {}  # Waits of requests that are not over.
    ways: dict[str, tuple[WeighedWay, ...]] = {}  # Ways last weighed for requests that wait.
    points: dict[PointKey, CostlyPoint] = {}  # Points that lost most tokens, as far as a bounded table knows.
    since_ns: int = 0  # Time of the first point.
    is_whole: bool = True

    def note_departed(
        self, digest: int, tokens: bytes, departure: Departure, tier: str, policy: str, at_ns: int
    ) -> None:
        """Remember that a span is resident nowhere any more; the oldest are forgotten beyond the bounds."""
        self._note(digest, Departed(tokens, departure, tier, policy, at_ns))

    def _note(self, digest: int, gone: Departed) -> None:
        before = self.departed.pop(digest, None)
        if before is not None:
            self.departed_bytes -= len(before.label)
        self.departed[digest] = gone
        self.departed_bytes += len(gone.label)
        while len(self.departed) > MOST_DEPARTED or self.departed_bytes > MOST_DEPARTED_BYTES:
            _, oldest = self.departed.popitem(last=False)
            self.departed_bytes -= len(oldest.label)
            self.is_whole = False

    def note_gone(self, gone: list[Node], departure: Departure, tier: str, policy: str, at_ns: int) -> None:
        """Remember nodes that left the tree together.

        Of more than MOST_DEPARTED only the last are noted: the others would be forgotten at once.
        """
        if len(gone) > MOST_DEPARTED:
            self.is_whole, gone = False, gone[-MOST_DEPARTED:]
        for node in gone:
            self._note(node.digest, Departed(node.label, departure, tier, policy, at_ns, is_wide=node.rare.is_wide))

    def note_wait(self, request_id: str, wait: Wait) -> None:
        """Remember a wait of a request; beyond MOST_WAITS the last entry is extended and takes this one's kind."""
        if wait.end_ns <= wait.start_ns:
            return
        waits = self.waits.setdefault(request_id, [])
        if len(waits) < MOST_WAITS:
            waits.append(wait)
        else:
            waits[-1] = msgspec.structs.replace(wait, start_ns=waits[-1].start_ns)

    def note_weighed(self, request_id: str, ways: Sequence[WeighedWay]) -> None:
        """Remember the ways that were last compared for a waiting request, or that none were."""
        self.ways.pop(request_id, None)
        if ways:
            self.ways[request_id] = tuple(ways)

    def note_admitted(self, admission: Admission) -> None:
        """Remember an attempt of a request, at most MOST_ATTEMPTS of each: the first and the latest."""
        attempts = self.admissions.get(admission.request_id)
        if attempts is None:
            self.admissions[admission.request_id] = [admission]
            if len(self.admissions) > MOST_ADMISSIONS:
                del self.admissions[next(iter(self.admissions))]
            return
        if len(attempts) == MOST_ATTEMPTS:
            del attempts[1]  # The first one tells most: its waits and prompt spans led to the caller's first token.
        attempts.append(admission)

    def note_taken(self, request_id: str, attempt: int, took_us: Mapping[str, int]) -> None:
        """Note how long parts of the way took by which an attempt's prefix was restored, in microseconds by name."""
        attempts = self.admissions.get(request_id)
        if not attempts or attempts[-1].attempt != attempt:
            return
        replace = msgspec.structs.replace
        ways = tuple(
            replace(way, parts=tuple(replace(part, took_us=took_us.get(part.name, -1)) for part in way.parts))
            if way.is_taken
            else way
            for way in attempts[-1].ways
        )
        attempts[-1] = replace(attempts[-1], ways=ways)

    def note_point(self, namespace: str, point: DivergencePoint, request_id: str, at_ns: int) -> None:
        """Add a prompt's loss to its divergence point; the latest prompt there stands for all.

        Where the table is full, a new point replaces the cheapest, and continues from what that had lost (Space-Saving:
        Metwally, Agrawal and El Abbadi, ICDT 2005, section 3, with weights).
        """
        if not self.since_ns:
            self.since_ns = at_ns
        end = len(point.before) - (point.position - point.page_start) * TOKEN_BYTES
        key = (namespace, point.page_start, point.before[max(0, end - POINT_TOKENS * TOKEN_BYTES) : end])
        known = self.points.get(key)
        requests, lost_tokens, lost_us, error_tokens = 0, 0, 0, 0
        if known is not None:
            requests, lost_tokens, lost_us = known.requests, known.lost_tokens, known.lost_us
            error_tokens = known.error_tokens
        elif len(self.points) == MOST_POINTS:
            cheapest = min(self.points, key=lambda each: self.points[each].lost_tokens)
            lost_tokens = error_tokens = self.points.pop(cheapest).lost_tokens
        self.points[key] = CostlyPoint(
            namespace=namespace,
            point=point,
            requests=requests + 1,
            lost_tokens=lost_tokens + point.lost_tokens,
            lost_us=lost_us + point.lost_us,
            error_tokens=error_tokens,
            request_id=request_id,
            at_ns=at_ns,
        )

    def forget_waiting(self, request_id: str) -> None:
        """Forget the waits of a request that is over, and the ways that were weighed for it."""
        self.waits.pop(request_id, None)
        self.ways.pop(request_id, None)


def forgotten() -> Recollection:
    """Return the empty memory of a scheduler that goes on from a snapshot."""
    return Recollection(is_whole=False)
