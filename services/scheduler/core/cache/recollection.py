"""What the core remembers only to explain itself: what left the cell's memory and how, and recent admissions.

It decides nothing, so no snapshot holds it (:mod:`snapshot`): a scheduler that has restarted says that it does not
know. All of it is bounded, and what was noted first is forgotten first.

What left is kept as a node was: the tokens of its span, under its digest, so that later the very tokens decide how much
of a prompt it was (:mod:`misses`). The bytes of the tokens are the node's own, which cost nothing to keep but memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.messages.explanations import Admission, Departure, Wait

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node

MOST_DEPARTED = 8192
MOST_DEPARTED_BYTES = 16 * 2**20
MOST_ADMISSIONS = 1024
MOST_ATTEMPTS = 4
MOST_WAITS = 32


class Departed(msgspec.Struct, frozen=True, gc=False):
    """A span that was cached: its tokens (packed), and how, from where, by which policy and when it left."""

    tokens: bytes
    departure: Departure
    tier: str
    policy: str
    at_ns: int


class Recollection(msgspec.Struct):
    """``is_whole`` while nothing that left has been forgotten since the very first input."""

    departed: dict[int, Departed] = {}  # By the digest of a node, oldest first.
    departed_bytes: int = 0
    admissions: dict[str, list[Admission]] = {}  # By request, its attempts in order; oldest request first.
    waits: dict[str, list[Wait]] = {}  # Of requests that are not over.
    is_whole: bool = True


def forgotten() -> Recollection:
    """What a scheduler has that goes on from a snapshot."""
    return Recollection(is_whole=False)


def note_departed(
    memory: Recollection, digest: int, tokens: bytes, departure: Departure, tier: str, policy: str, at_ns: int
) -> None:
    """Remember that a span is resident nowhere any more."""
    before = memory.departed.pop(digest, None)
    if before is not None:
        memory.departed_bytes -= len(before.tokens)
    memory.departed[digest] = Departed(tokens, departure, tier, policy, at_ns)
    memory.departed_bytes += len(tokens)
    while len(memory.departed) > MOST_DEPARTED or memory.departed_bytes > MOST_DEPARTED_BYTES:
        oldest = next(iter(memory.departed))
        memory.departed_bytes -= len(memory.departed.pop(oldest).tokens)
        memory.is_whole = False


def note_gone(memory: Recollection, gone: list[Node], departure: Departure, tier: str, policy: str, at_ns: int) -> None:
    """The same of nodes that left the tree together."""
    for node in gone:
        note_departed(memory, node.digest, node.tokens, departure, tier, policy, at_ns)


def note_wait(memory: Recollection, request_id: str, wait: Wait) -> None:
    """Remember that a waiting request stood aside for a while; past the bound, waits are one of the last kind."""
    if wait.end_ns <= wait.start_ns:
        return
    waits = memory.waits.setdefault(request_id, [])
    if len(waits) < MOST_WAITS:
        waits.append(wait)
    else:
        waits[-1] = msgspec.structs.replace(wait, start_ns=waits[-1].start_ns)


def note_admitted(memory: Recollection, admission: Admission) -> None:
    """Remember an attempt of a request."""
    attempts = memory.admissions.get(admission.request_id)
    if attempts is None:
        memory.admissions[admission.request_id] = [admission]
        if len(memory.admissions) > MOST_ADMISSIONS:
            del memory.admissions[next(iter(memory.admissions))]
        return
    if len(attempts) == MOST_ATTEMPTS:
        del attempts[1]  # The first says most: its waits and its prompt are the ones that the caller's first token had.
    attempts.append(admission)


def forget_waits(memory: Recollection, request_id: str) -> None:
    """A request is over."""
    memory.waits.pop(request_id, None)
