"""Where answers stand in a rendered conversation, and names for those places. Pure.

A chat template opens each answer with the same text, the *opening*: ``<|im_start|>assistant`` and a line break, say. So
an earlier answer stands behind an earlier opening, and the one that is asked for behind the last, at the end. A place's
name is a digest of the namespace and of all text before it. Equal names mean that the same was said up to there, in a
cache that both may use; and the hash that gives the name gives the key of what is kept under it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.gateway.turns.front_hash import FrontHash, HashedTexts

NAME_BYTES = 16
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Place:
    """``offset`` counts the characters before it, ``name`` is 32 hex digits, ``key`` seals what is kept there."""

    offset: int
    name: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer of some text at a place: the ``name`` under which a bucket has its ids, 32 hex digits."""

    place: Place
    name: str


def entry(place: Place, text: str, closing: str) -> Entry:
    """Return the entry of the answer that ``text`` begins with, up to ``closing`` or its end, without space around
    it.
    """
    said = (text.partition(closing)[0] if closing else text).strip()
    digest = hashlib.blake2b(
        said.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, key=place.key, person=b"tc-entry-1"
    )
    return Entry(place, digest.hexdigest())


def places(text: str, opening: str, namespace: str, answers: int, texts: HashedTexts | None = None) -> list[Place]:
    """Places behind the first openings of ``text``, in order: at most one more than ``answers``.

    An opening that somebody wrote into a message makes a place, at which nothing is known. With ``texts``, what a text
    of late begins with is not hashed again.
    """
    found: list[Place] = []
    begun = hashlib.blake2b(namespace.encode(), digest_size=NAME_BYTES + KEY_BYTES, person=b"tc-answers-1")
    front = FrontHash(begun, text, namespace, texts)
    start = text.find(opening) if opening else -1
    while start >= 0 and len(found) <= answers:
        offset = start + len(opening)
        told = front.digest_at(offset)
        found.append(Place(offset, told[:NAME_BYTES].hex(), told[NAME_BYTES:]))
        start = text.find(opening, offset)
    front.keep()
    return found
