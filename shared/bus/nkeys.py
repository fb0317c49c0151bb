"""NATS's own keys: Ed25519 seeds in base32 with a prefix and a checksum, as ``nsc`` and ``nk`` write them.

A ``.creds`` file holds a signed user JWT and the seed of that user; a bare nkey file holds the seed alone, and the
server knows the public key. Either way the server sends a nonce, which the seed signs; the seed itself never leaves the
process.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shared.errors import ConfigError

_SEED_PREFIX = 18 << 3
_USER_PREFIX = 20 << 3
_SEED_BYTES = 32

_SECTION = r"-{3,}\s*BEGIN %s\s*-{3,}\s*(\S+)\s*-{3,}\s*END %s\s*-{3,}"
_JWT = re.compile(_SECTION % ("NATS USER JWT", "NATS USER JWT"))
_SEED = re.compile(_SECTION % ("USER NKEY SEED", "USER NKEY SEED"))


@dataclass(frozen=True, slots=True)
class UserKey:
    """A user's key, and the JWT that certifies it ("" where the server knows the key itself)."""

    _private: Ed25519PrivateKey
    jwt: str

    @property
    def public(self) -> str:
        """Public key as text, its name at the server: ``U…``."""
        raw = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return encode_key(bytes([_USER_PREFIX]) + raw)

    def sign(self, nonce: str) -> bytes:
        """Return the signature of a server's nonce, in base64."""
        return base64.b64encode(self._private.sign(nonce.encode()))


def encode_key(raw: bytes) -> str:
    """Return a prefixed key as text, with its checksum."""
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def read_user_key(text: str) -> UserKey:
    """Return the key in a ``.creds`` file or in a file with only a seed.

    Raises ConfigError, whose text holds no secret.
    """
    found = _SEED.search(text)
    if found is None:
        return UserKey(_private_key(text.strip()), "")
    jwt = _JWT.search(text)
    if jwt is None:
        raise ConfigError("it has a seed but no user JWT")
    return UserKey(_private_key(found[1]), jwt[1])


def _private_key(seed: str) -> Ed25519PrivateKey:
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError) as error:
        raise ConfigError("it holds no nkey seed") from error
    body, checksum = raw[:-2], raw[-2:]
    if len(body) != _SEED_BYTES + 2 or binascii.crc_hqx(body, 0).to_bytes(2, "little") != checksum:
        raise ConfigError("it holds no whole nkey seed")
    if body[0] & 0xF8 != _SEED_PREFIX or (body[0] & 7) << 5 | body[1] >> 3 != _USER_PREFIX:
        raise ConfigError("its nkey seed is not that of a user")
    return Ed25519PrivateKey.from_private_bytes(body[2:])
