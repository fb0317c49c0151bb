"""API keys: how one is made, and the digest by which it is known.

A key that Thermocline makes holds 256 random bits. Such a key cannot be guessed, neither at the API nor from its
digest, so the digest is plain SHA-256: a slow password hash (scrypt, Argon2) protects secrets that people choose, and
would here let unknown callers keep the gateway busy. For the same reason a key made elsewhere must be long.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from shared.errors import InvalidRequest

KEY_HEADER = "x-api-key"
"""Header in which Anthropic's clients send their key; others send a bearer token."""

PREFIX = "tc-"
KEY_BYTES = 32
MIN_GIVEN_CHARACTERS = 32
"""Shortest key that may be brought from elsewhere."""

MAX_GIVEN_CHARACTERS = 512
DIGEST_PREFIX = "sha256:"
KEY_ID_DIGITS = 12

_DIGEST = re.compile(rf"{DIGEST_PREFIX}[0-9a-f]{{64}}")
_GIVEN = re.compile(r"[\x21-\x7e]+")


def new_key() -> str:
    """Return a fresh key: ``tc-`` and 256 random bits in URL-safe base64."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def new_salt() -> str:
    """Return a fresh tenant salt: 32 hex digits."""
    return secrets.token_hex(16)


def key_hash(key: bytes) -> str:
    """Return the digest by which a key is stored: ``sha256:`` and 64 hex digits."""
    return DIGEST_PREFIX + hashlib.sha256(key).hexdigest()


def is_key_hash(text: str) -> bool:
    """Return whether a text has the form of :func:`key_hash`."""
    return bool(_DIGEST.fullmatch(text))


def key_id(hashed: str) -> str:
    """Return the id of a key for lists and logs: the first digits of its digest."""
    return hashed.removeprefix(DIGEST_PREFIX)[:KEY_ID_DIGITS]


def check_given_key(key: str) -> None:
    """Raise InvalidRequest for a key from elsewhere that is short enough to guess, or not valid in a header."""
    if not MIN_GIVEN_CHARACTERS <= len(key) <= MAX_GIVEN_CHARACTERS or not _GIVEN.fullmatch(key):
        raise InvalidRequest(
            f"a key must be random and have {MIN_GIVEN_CHARACTERS} to {MAX_GIVEN_CHARACTERS} printable ASCII "
            "characters without spaces"
        )


def tenant_id(key: bytes) -> str:
    """Return the cell's name for the holder of one of ``--api-keys``; it does not reveal the key."""
    return hashlib.blake2b(key, digest_size=8).hexdigest()
