"""The key under which a chunk lies on disk and in the object store.

Without keys nothing is encrypted. With keys everything is: a chunk whose tenant has none is neither written nor read,
because a storage that was told to encrypt must not write a tenant's tokens in the clear.
"""

from __future__ import annotations

from services.storage.chunk_sealing import Cipher
from services.storage.keys import DEFAULT_KEY_ID
from shared.errors import KeyMissing


class NoCipher:
    """A cipher without keys: a sealed chunk cannot be opened, and nothing is sealed."""

    def seal(self, key_id: str, plaintext: memoryview, aad: bytes) -> bytes:
        """Raise KeyMissing."""
        raise KeyMissing(f"there is no encryption key for {key_id}: --keys names none")

    def open(self, key_id: str, sealed: memoryview, aad: bytes) -> bytes:
        """Raise KeyMissing."""
        raise KeyMissing(f"there is no encryption key for {key_id}: --keys names none")

    def hide(self, key_id: str, identity: bytes) -> bytes:
        """Raise KeyMissing."""
        raise KeyMissing(f"there is no encryption key for {key_id}: --keys names none")

    def show(self, key_id: str, hidden: bytes) -> bytes:
        """Raise KeyMissing."""
        raise KeyMissing(f"there is no encryption key for {key_id}: --keys names none")


class ChunkKeys:
    """The cipher at hand, if any, and the keys of orders."""

    def __init__(self, cipher: Cipher | None) -> None:
        """Seal with ``cipher``; with None nothing is sealed, and sealed chunks cannot be opened."""
        self._is_sealing = cipher is not None
        self.cipher: Cipher = NoCipher() if cipher is None else cipher

    def key_id(self, ordered: str) -> str:
        """Return the key for chunks of an order that names ``ordered`` ("" is no salt); "" leaves them unencrypted."""
        return (ordered or DEFAULT_KEY_ID) if self._is_sealing else ""
