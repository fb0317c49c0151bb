"""Answers as they lie in the bucket: encrypted under the key of their place.

The key comes from the hash of the namespace and of all text before the answer (:mod:`services.gateway.turns.places`).
So an answer opens for those alone who have the conversation up to it, and the tenant's salt. A copy of the bucket tells
nobody what was said, and what a stranger puts into it does not open. The cipher is AES-256-GCM with random nonces; a
key sees the few writes of one place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.gateway.turns.places import Place
from shared.undecodable import UNDECODABLE

NONCE_BYTES = 12

_DECODER = msgspec.msgpack.Decoder(list[bytes])


def seal(place: Place, answers: Sequence[bytes], nonces: Callable[[int], bytes] = os.urandom) -> bytes:
    """The entry of a place: ids (packed int32) of each answer, the latest first."""
    nonce = nonces(NONCE_BYTES)
    return nonce + AESGCM(place.key).encrypt(nonce, msgspec.msgpack.encode(list(answers)), place.name.encode())


def unseal(place: Place, sealed: bytes) -> list[bytes] | None:
    """What :func:`seal` was given; None for what is no entry of this place."""
    try:
        plain = AESGCM(place.key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place.name.encode())
        answers = _DECODER.decode(plain)
    except (InvalidTag, ValueError, *UNDECODABLE):  # ValueError: shorter than a nonce.
        return None
    return answers if all(len(packed) % 4 == 0 for packed in answers) else None
