"""The fronts of prompts that a gateway need not send to its scheduler again, as far as it knows.

The scheduler keeps the tokens of computed prompts, and accepts a prompt as a base, which it has, and a tail
(``SubmitRequest.base``). Which bases it has is learned from answers that ended, and is a hint: where one is gone the
scheduler replies ``PromptWanted`` and is sent the whole prompt. Digests depend on the namespace, so no tenant's salt
needs a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared import prompt_chain
from shared.ids import DIGEST_BYTES, TOKEN_BYTES
from shared.messages.base import pack_int32
from shared.messages.requests import PromptBase, SubmitRequest
from shared.prompt_chain import block_digests

MOST_BLOCKS = 65_536
"""Limit on remembered blocks, the same as a scheduler's."""


class PromptBases:
    """Digests of blocks that the scheduler is believed to hold, least recently used first."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        """Begin with no blocks, and remember at most ``most`` of them."""
        self._held: dict[bytes, None] = {}
        self._most = most

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._held)

    def abridged(self, request: SubmitRequest, blocks: bytes) -> SubmitRequest:
        """Return the request with the longest base that the scheduler is believed to hold, or unchanged without one.

        ``blocks`` are the digests of its prompt's whole blocks. The tail keeps at least one token.
        """
        for number in range((request.prompt_tokens - 1) // prompt_chain.BLOCK_TOKENS, 0, -1):
            digest = blocks[(number - 1) * DIGEST_BYTES : number * DIGEST_BYTES]
            if digest in self._held:
                self._note(digest)
                base = PromptBase(digest=digest, tokens=number * prompt_chain.BLOCK_TOKENS)
                tail = request.prompt[number * prompt_chain.BLOCK_BYTES :]
                return msgspec.structs.replace(request, prompt=b"", base=base, tail=tail)
        return request

    def answered(self, request: SubmitRequest, blocks: bytes, output: Sequence[int]) -> None:
        """Note that the scheduler has this prompt and all but the last token of ``output``, if both may be cached."""
        if not request.cache.write or request.cache.importance is not None:
            return
        behind = request.prompt[len(blocks) // DIGEST_BYTES * prompt_chain.BLOCK_BYTES :]
        if len(behind) // TOKEN_BYTES + len(output) > prompt_chain.BLOCK_TOKENS:
            behind += pack_int32(output[:-1])
            blocks += block_digests(request.namespace, behind, above=blocks[-DIGEST_BYTES:])
        for start in range(0, len(blocks), DIGEST_BYTES):
            self._note(blocks[start : start + DIGEST_BYTES])
        while len(self._held) > self._most:
            del self._held[next(iter(self._held))]

    def gone(self, blocks: bytes, base: PromptBase) -> None:
        """Note that the scheduler lacks this base of a prompt with these ``blocks``, and so all blocks behind it."""
        for start in range((base.tokens // prompt_chain.BLOCK_TOKENS - 1) * DIGEST_BYTES, len(blocks), DIGEST_BYTES):
            self._held.pop(blocks[start : start + DIGEST_BYTES], None)

    def _note(self, digest: bytes) -> None:
        self._held.pop(digest, None)
        self._held[digest] = None
