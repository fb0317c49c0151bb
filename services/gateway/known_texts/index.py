"""Tokens of segments by digest: bounded by bytes, least recently used dropped first. Used by several threads.

A digest stands for a namespace and a text, and cannot be computed outside the process: its key is drawn at the start.
So no text of one tenant can stand for another's, and tenants with salts find nothing of others.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from services.gateway.known_texts.fronts import Fronts

DIGEST_BYTES = 16
ENTRY_BYTES = 250
"""Approximate memory of an entry besides its tokens: objects, the digest and the table's slots."""


class KnownTexts:
    """Known segments, and the ``fronts`` of whole long texts."""

    def __init__(
        self,
        most_bytes: int,
        observe: Callable[[int], None] = lambda nbytes: None,
        *,
        fronts: Fronts | None = None,
    ) -> None:
        """Draw the key of the digests, and keep segments in up to ``most_bytes``.

        ``observe`` gets the segments' bytes after each change, in the thread that made it. ``fronts`` have a bound of
        their own; with None no fronts are kept.
        """
        self.fronts = fronts or Fronts(0)
        self._most_bytes = most_bytes
        self._observe = observe
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.nbytes = 0

    def digests(self, namespace: str, texts: Iterable[str]) -> list[bytes]:
        """Return the digest of each text in a namespace."""
        blake2b = hashlib.blake2b
        key = blake2b(namespace.encode(), digest_size=32, key=self._secret).digest()
        return [
            # A lone surrogate can come from a template, though not from JSON.
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, key=key).digest()
            for text in texts
        ]

    def recall(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the tokens (packed int32) of each text, None where not known, and count them as used."""
        entries = self._entries
        with self._lock:
            found = [entries.get(digest) for digest in digests]
            # The last segment first, so that the first is kept longest: other texts begin with it, too.
            for digest, tokens in zip(reversed(digests), reversed(found), strict=True):
                if tokens is not None:
                    entries.move_to_end(digest)
        return found

    def remember(self, told: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep tokens (packed int32) by their texts' digests, given as pairs (digest, tokens)."""
        with self._lock:
            for digest, tokens in reversed(told):
                self.nbytes += _nbytes(tokens) - _nbytes(self._entries.pop(digest, None))
                self._entries[digest] = tokens
            while self.nbytes > self._most_bytes and self._entries:
                _, dropped = self._entries.popitem(last=False)
                self.nbytes -= _nbytes(dropped)
            nbytes = self.nbytes
        self._observe(nbytes)


def _nbytes(tokens: bytes | None) -> int:
    return 0 if tokens is None else ENTRY_BYTES + len(tokens)
