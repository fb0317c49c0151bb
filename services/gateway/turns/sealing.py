"""Answers as they lie in the bucket: encrypted under the key of their place.

The key comes from the hash of the namespace and of all text before the answer (:mod:`services.gateway.turns.places`).
So an answer opens for those alone who have the conversation up to it, and the tenant's salt. A copy of the bucket tells
nothing of what was said, and what a stranger puts into it does not open. The cipher is AES-256-GCM with random nonces;
a key sees the few writes of one place.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.gateway.turns.places import Entry

NONCE_BYTES = 12


def seal(entry: Entry, packed: bytes, nonces: Callable[[int], bytes] = os.urandom) -> bytes:
    """Seal an answer for a bucket: nonce, and ids (packed int32) encrypted and authenticated with the name."""
    nonce = nonces(NONCE_BYTES)
    return nonce + AESGCM(entry.place.key).encrypt(nonce, packed, entry.name.encode())


def unseal(entry: Entry, sealed: bytes) -> bytes | None:
    """Return what :func:`seal` was given; None for bytes that are not of this entry."""
    try:
        packed = AESGCM(entry.place.key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], entry.name.encode())
    except (InvalidTag, ValueError):  # ValueError: shorter than a nonce.
        return None
    return packed if len(packed) % 4 == 0 else None
