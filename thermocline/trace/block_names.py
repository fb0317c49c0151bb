"""Names of a prompt's blocks that reveal nothing of its text.

A name is a keyed digest of the block and all text before it, so two prompts share names exactly as far as they are
equal, in blocks of 512 tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import ceil

from thermocline.trace.format import BLOCK_TOKENS

_NAME_BITS = 53
"""JSON readers keep such integers exact; in one of 18,000 logs of a million blocks two share a name."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The naming under one salt; names under different salts cannot be compared."""

    salt: bytes

    def of(self, model: str, packed: bytes, bytes_per_token: float) -> tuple[int, list[int]]:
        """Return the number of a prompt's tokens, and the names of its blocks; the last may be shorter.

        ``packed`` is its text or its token ids, with ``bytes_per_token`` on average. Prompts for
        different models share no names.
        """
        block_bytes = max(1, round(BLOCK_TOKENS * bytes_per_token))
        digest = self._digest(b"", model.encode("utf-8", "surrogatepass"))
        names = []
        for begin in range(0, len(packed), block_bytes):
            digest = self._digest(digest, packed[begin : begin + block_bytes])
            names.append(int.from_bytes(digest[:8], "big") >> 64 - _NAME_BITS)
        whole, rest = divmod(len(packed), block_bytes)
        return whole * BLOCK_TOKENS + ceil(rest / block_bytes * BLOCK_TOKENS), names

    def _digest(self, before: bytes, block: bytes) -> bytes:
        return hashlib.blake2b(before + block, digest_size=32, key=self.salt, person=b"trace blocks").digest()
