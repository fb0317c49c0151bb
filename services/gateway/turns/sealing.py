"""Encryption of answers in the bucket, under the key of their place.

The key comes from the hash of the namespace and of all text before the answer (:mod:`services.gateway.turns.places`).
So only a process that has the conversation up to the answer, and the tenant's salt, can decrypt it. A copy of the
bucket reveals no answer, and a forged entry does not decrypt. The cipher is AES-256-GCM with random nonces; a key is
used for the few writes of one place.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.gateway.turns.places import Entry

NONCE_BYTES = 12


def seal(entry: Entry, packed: bytes, nonces: Callable[[int], bytes] = os.urandom) -> bytes:
    """Return the sealed answer: nonce, and ids (packed int32) encrypted and authenticated with the entry's name."""
    nonce = nonces(NONCE_BYTES)
    return nonce + AESGCM(entry.place.key).encrypt(nonce, packed, entry.name.encode())


def unseal(entry: Entry, sealed: bytes) -> bytes | None:
    """Return the ids that :func:`seal` was given; None for bytes that were not sealed for this entry."""
    try:
        packed = AESGCM(entry.place.key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], entry.name.encode())
    except (InvalidTag, ValueError):  # ValueError: shorter than a nonce.
        return None
    return packed if len(packed) % 4 == 0 else None
