"""Conversations of late whose earlier answers stand in their ids already, to go on from.

A long conversation comes again with a little more at its end. What was put together of it before is taken over as one
piece, so that neither its messages nor its answers are looked at one by one again.
"""

from __future__ import annotations

from services.gateway.known_texts.alike import Entry, TextsAlike
from services.gateway.turns.splicing import Front

JOINT_BYTES = 400
"""What a joint takes, about: objects, and its place's name."""

SplicedTexts = TextsAlike[Front]


def keep_front(
    fronts: SplicedTexts, namespace: str, text: str, front: Front, found: tuple[Entry[Front], int] | None
) -> None:
    """Let later texts go on from this one, unless it has no more answers than the one that it went on from.

    ``found`` is that one, and how many characters both begin with.
    """
    ends = [joint.end for joint in front.joints if joint.kept.tokens]
    if not ends:
        return
    replaced = None
    if found is not None:
        before = found[0].value.joints
        if ends[-1] == before[-1].end and ends[-1] <= found[1]:
            return
        replaced = found[0] if before[-1].end <= found[1] else None
    fronts.put(namespace, text, front, len(front.tokens) + JOINT_BYTES * len(front.joints), replaced)
