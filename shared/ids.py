"""Identities: namespaces, chain hashes of cached pages, and names of processes.

A cached page is identified by 16 bytes: the digest of its namespace and of every token from the root to
its end. Two pages with equal identities hold the same KV.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket

DIGEST_BYTES = 16

TOKEN_BYTES = 4
"""Bytes of a token in packed tokens: a little-endian int32."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def namespace_digest(model: str, *, adapter: str = "", tenant_salt: str = "", salt: str = "") -> str:
    """Return the namespace (32 hex digits) under which KV of exactly this kind is kept and found.

    ``tenant_salt`` is the operator's, ``salt`` the caller's: no salt of a caller of one tenant gives the namespace of
    another tenant, or of callers without one.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts = ["thermocline-namespace-1", model, adapter, salt]
    if tenant_salt:
        parts = ["thermocline-namespace-2", model, adapter, tenant_salt, salt]
    for part in (*parts, "exact"):  # Lossy KV is never kept.
        encoded = part.encode()
        # The length goes first so that no two different tuples feed the same bytes.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def key_digest(salt: str) -> str:
    """Return 32 hex digits that name the encryption key of a tenant's salt without revealing it; "" for no salt."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), person=b"tc-key-1", digest_size=DIGEST_BYTES).hexdigest()


def chain_root(namespace: str) -> bytes:
    """Return the identity above the first page of a namespace."""
    return bytes.fromhex(namespace)


def chain_page(previous: bytes, page_tokens: bytes) -> bytes:
    """Return the identity of a page from that of the page before it and its own tokens (packed int32)."""
    return hashlib.blake2b(page_tokens, key=previous, digest_size=DIGEST_BYTES).digest()


def chain_pages(previous: bytes, tokens: bytes, page_token_bytes: int) -> bytes:
    """Return the identities of all pages of ``tokens`` (packed int32), 16 bytes each.

    Equal to :func:`chain_page` page after page.
    """
    blake2b = hashlib.blake2b
    identities = []
    for start in range(0, len(tokens), page_token_bytes):
        previous = blake2b(tokens[start : start + page_token_bytes], key=previous, digest_size=DIGEST_BYTES).digest()
        identities.append(previous)
    return b"".join(identities)


def split_digests(packed: bytes) -> list[bytes]:
    """Return the digests of a packed list (identities of pages, names of chunks), 16 bytes each."""
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]


def is_digest(text: str) -> bool:
    """Return whether a text is a digest of 32 lower-case hex digits, as namespaces are."""
    return len(text) == 2 * DIGEST_BYTES and not text.strip("0123456789abcdef")


def new_id(prefix: str) -> str:
    """Return a fresh random identity such as ``req-3f…``, for edges; never called in a core."""
    return f"{prefix}-{secrets.token_hex(8)}"


def node_name() -> str:
    """Return this host's name with only characters that a subject allows, at most 64."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "node"


def is_valid_name(name: str) -> bool:
    """Return whether a name may be a token of a NATS subject: 1 to 64 letters, digits, _ or -."""
    return bool(_NAME.fullmatch(name))
