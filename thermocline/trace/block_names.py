"""Names of a prompt's blocks, from which nothing of its text can be read.

A name is a keyed digest of the block and of all that stands before it, so two prompts have names in common exactly as
far as they are equal, in blocks of 512 tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import ceil

from thermocline.trace.format import BLOCK_TOKENS

_NAME_BITS = 53
"""Whole numbers that every reader of JSON holds exactly; two of a million blocks share a name once in 18,000 logs."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names under one salt: those of another salt have nothing in common with them."""

    salt: bytes

    def of(self, model: str, packed: bytes, bytes_per_token: float) -> tuple[int, list[int]]:
        """Return the tokens of a prompt and the names of its blocks, the last of which may be shorter.

        ``packed`` is its text or its token ids, of which a token takes ``bytes_per_token`` on average. Prompts for
        different models share nothing.
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
