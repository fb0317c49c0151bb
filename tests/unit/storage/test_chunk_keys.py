"""Under whose key a chunk lies."""

import pytest

from services.storage.chunk_keys import ChunkKeys, NoCipher
from services.storage.keys import DEFAULT_KEY_ID
from shared.errors import KeyMissing


def test_without_keys_nothing_is_encrypted() -> None:
    """Whoever's it is; and what is sealed cannot be opened."""
    keys = ChunkKeys(None)

    assert keys.key_id("") == keys.key_id("tenant") == ""
    with pytest.raises(KeyMissing):
        keys.cipher.open("tenant", memoryview(b""), b"")
    with pytest.raises(KeyMissing):
        keys.cipher.seal("tenant", memoryview(b""), b"")


def test_with_keys_everything_is_encrypted() -> None:
    """A request without a salt uses the default key."""
    keys = ChunkKeys(NoCipher())

    assert keys.key_id("tenant") == "tenant"
    assert keys.key_id("") == DEFAULT_KEY_ID
