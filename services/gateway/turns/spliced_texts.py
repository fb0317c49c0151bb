"""Recent conversations with the ids of their earlier answers, to continue from.

A long conversation comes again with a little more at its end. Its spliced tokens are reused as one piece, so that
neither its messages nor its answers are processed one by one again.
"""

from __future__ import annotations

from services.gateway.known_texts.alike import Entry, TextsAlike
from services.gateway.turns.splicing import Front

JOINT_BYTES = 400
"""Approximate memory of a joint: objects, and its place's name."""

SplicedTexts = TextsAlike[Front]


def keep_front(
    fronts: SplicedTexts, namespace: str, text: str, front: Front, found: tuple[Entry[Front], int] | None
) -> None:
    """Keep a text for later ones to continue from, unless it has no more answers than the text that it continued.

    ``found`` is that text, and the length of the common beginning in characters.
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
