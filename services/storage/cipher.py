"""Chunks encrypted at rest: AES-256-GCM under a tenant's key, each chunk under a key of its own derived from it.

GCM must never see one nonce twice under one key. Random nonces of 96 bits are held to be safe for 2**32 messages a
key (NIST SP 800-38D, 8.3), which a large cell that saves some million chunks an hour under one default key could
pass within months, and storages cannot share a counter. So what encrypts is not the tenant's key but one derived from
it and from the chunk's authenticated data, which holds the chunk's name: each such key sees only the few sealings
of one chunk, by every storage that ever computes it, and random nonces are far from their bound.
The derivation is BLAKE2b, keyed and personalised, which is a pseudo-random function of its input.

Identities are hidden by one block of AES under a key that is derived for that alone: a permutation of 16 bytes that
only the key lets compute in either direction. Equal identities have equal names, which is what names are for.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

from services.storage import measures
from services.storage.config import DEFAULT_KEY_VARIABLE, StorageConfig
from services.storage.key_ring import KeyRing
from services.storage.keys import KEY_BYTES
from shared.errors import IntegrityError, KeyMissing

NONCE_BYTES = 12

_PERSON = b"tc-chunk-key-1"
_NAMES_PERSON = b"tc-name-key-1"


def open_cipher(config: StorageConfig, *, environ: Mapping[str, str] | None = None) -> Cipher | None:
    """Return the cipher of ``config.keys`` and THERMOCLINE_KEY_DEFAULT, or None where neither is given.

    Raises ConfigError with every fault: a process that was told to encrypt does not start without its keys.
    """
    variables = os.environ if environ is None else environ
    if not config.keys and DEFAULT_KEY_VARIABLE not in variables:
        return None
    return Cipher(KeyRing(config.keys, environ=variables, now_s=time.monotonic()))


class Cipher:
    """Seals and opens under tenants' keys; safe from any thread."""

    def __init__(
        self,
        keys: KeyRing,
        *,
        clock: Callable[[], float] = time.monotonic,
        nonces: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Take tenants' keys from ``keys``, which :meth:`reload` reads again.

        ``clock`` (in seconds, the one with which ``keys`` was opened) and ``nonces`` (returns so many random bytes) are
        arguments for tests.
        """
        self.keys = keys
        self._clock = clock
        self._nonces = nonces

    def seal(self, key_id: str, plaintext: memoryview, aad: bytes) -> bytes:
        """Return nonce (12 bytes), ciphertext (as long as the plaintext) and tag (16), in one piece.

        ``aad`` is authenticated and not hidden; it must name the chunk. Each call draws a fresh random nonce; the
        module says why that is safe for any number of chunks. Raises KeyMissing: then the chunk must not be written.
        """
        cipher = self._cipher_of(key_id, aad, "seal")
        nonce = self._nonces(NONCE_BYTES)
        return nonce + cipher.encrypt(nonce, plaintext, aad)

    def open(self, key_id: str, sealed: memoryview, aad: bytes) -> bytes:
        """Return the plaintext that :meth:`seal` was given.

        Raises KeyMissing when the tenant has no key (any more), and IntegrityError(code="wrong_key") when ``sealed`` or
        ``aad`` is not what was sealed under this key: another key or a changed bit, which cannot be told apart.
        """
        cipher = self._cipher_of(key_id, aad, "open")
        try:
            return cipher.decrypt(bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:], aad)
        except (InvalidTag, ValueError) as error:  # ValueError: shorter than nonce and tag.
            measures.CIPHER_REFUSALS.labels("open", "wrong_key").inc()
            raise IntegrityError("a chunk was not sealed with this key, or was changed", code="wrong_key") from error

    def hide(self, key_id: str, identity: bytes) -> bytes:
        """Return the 16 bytes under which a chunk of this identity (16 bytes) is known at rest. Raises KeyMissing."""
        return self._blocks_of(key_id, "seal").encryptor().update(identity)

    def show(self, key_id: str, hidden: bytes) -> bytes:
        """Return the identity that :meth:`hide` was given; 16 meaningless bytes if another key has hidden it.

        Raises KeyMissing.
        """
        return self._blocks_of(key_id, "open").decryptor().update(hidden)

    def reload(self) -> None:
        """Read the keys file again, as after SIGHUP."""
        self.keys.reload(self._clock())

    def _cipher_of(self, key_id: str, aad: bytes, operation: str) -> AESGCM:
        return AESGCM(self._derived(key_id, aad, _PERSON, operation))

    def _blocks_of(self, key_id: str, operation: str) -> ciphers.Cipher[ECB]:
        # The input is a single block: the known weakness of this mode is equal blocks within a message.
        return ciphers.Cipher(AES256(self._derived(key_id, b"", _NAMES_PERSON, operation)), ECB())  # noqa: S305

    def _derived(self, key_id: str, what: bytes, person: bytes, operation: str) -> bytes:
        try:
            tenant_key = self.keys.key(key_id, self._clock())
        except KeyMissing:
            measures.CIPHER_REFUSALS.labels(operation, "key_missing").inc()
            raise
        return hashlib.blake2b(what, key=tenant_key, person=person, digest_size=KEY_BYTES).digest()
