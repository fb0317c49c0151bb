"""The places of answers in a rendered conversation, and names for them. Pure.

A chat template opens each answer with the same text, the *opening*: ``<|im_start|>assistant`` and a line break, say. So
an earlier answer stands behind an earlier opening, and the requested one behind the last, at the end. A place's name is
a digest of the namespace and of all text before it. Equal names mean equal conversations up to there, in a cache that
both may use; and the hash that gives the name also gives the key that encrypts the answers at the place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.gateway.turns.front_hash import FrontHash, HashedTexts

NAME_BYTES = 16
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an answer: ``offset`` characters into the text.

    ``name`` is 32 hex digits, ``key`` seals its answers.
    """

    offset: int
    name: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer with some text at a place: the ``name`` of its ids in a bucket, 32 hex digits."""

    place: Place
    name: str


def entry(place: Place, text: str, closing: str) -> Entry:
    """Return the entry of the answer at the start of ``text``.

    The answer reaches up to ``closing`` or the end of ``text``, and counts without space around it.
    """
    said = (text.partition(closing)[0] if closing else text).strip()
    digest = hashlib.blake2b(
        said.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, key=place.key, person=b"tc-entry-1"
    )
    return Entry(place, digest.hexdigest())


def places(text: str, opening: str, namespace: str, answers: int, texts: HashedTexts | None = None) -> list[Place]:
    """Return the places behind the first openings of ``text``, in order: at most one more than ``answers``.

    An opening that a caller wrote into a message makes a place without any known answer. With ``texts``, a beginning
    shared with a recent text is not hashed again.
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
