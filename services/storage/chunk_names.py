"""The names under which chunks lie at rest.

In the cell a chunk is known by its identity, a digest of its tokens: an attacker who guesses them from the root
confirms the guess by the name alone. So a sealed chunk has another name at rest, its identity encrypted as one block
under the tenant's key (``cipher.Cipher.hide``). Equal chunks still have equal names, so that nodes with one key share
them, and the identity can be computed from the name with the key. Chunks that are not sealed keep their own names.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from services.storage.backends import ChunkKey
from services.storage.chunk_sealing import Cipher
from shared.errors import KeyMissing

MAX_NAMESPACES = 65_536
"""Most namespaces whose key is remembered. A forgotten one is learnt again by its next order."""


class ChunkNames:
    """Translation between names of the cell and names at rest. Safe from any thread."""

    def __init__(self, cipher: Cipher | None = None) -> None:
        """Prepare; without a cipher nothing is sealed, and names are the same."""
        self._cipher = cipher
        self._lock = threading.Lock()
        self._key_ids: OrderedDict[str, str] = OrderedDict()  # Key ids by namespace, the last used at the end.

    def learn(self, namespace: str, key_id: str) -> None:
        """Note that chunks of this namespace are sealed with this key; "" is none."""
        if self._cipher is None or not key_id:
            return
        with self._lock:
            self._key_ids[namespace] = key_id
            self._key_ids.move_to_end(namespace)
            if len(self._key_ids) > MAX_NAMESPACES:
                self._key_ids.popitem(last=False)

    def at_rest(self, key: ChunkKey) -> ChunkKey:
        """Return a chunk's name at rest; a name that is one already is returned as it is. Raises KeyMissing."""
        if self._cipher is None or key.is_sealed:
            return key
        key_id = self._key_id(key.namespace)
        if not key_id:
            raise KeyMissing(f"it is not known whose key seals namespace {key.namespace}")
        return replace(key, identity=self._cipher.hide(key_id, key.identity), is_sealed=True)

    def in_cell(self, name: ChunkKey) -> ChunkKey:
        """Return the chunk with this name at rest; ``name`` itself without the key, which is not requested for this."""
        key_id = self._key_id(name.namespace)
        if self._cipher is None or not name.is_sealed or not key_id:
            return name
        try:
            return replace(name, identity=self._cipher.show(key_id, name.identity), is_sealed=False)
        except KeyMissing:
            return name

    def _key_id(self, namespace: str) -> str:
        with self._lock:
            return self._key_ids.get(namespace, "")
