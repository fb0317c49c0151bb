"""Digests of a prompt's blocks, taken from an earlier prompt as far as both have the same tokens.

Comparing bytes is ten times faster than hashing them. A digest stands for all tokens up to its block's end
(:mod:`shared.prompt_chain`), so one hashed block shows which earlier prompt to compare with, and from there on equal
tokens have equal digests. Bounded by bytes; the least recently used are dropped first. Used by several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from shared import prompt_chain
from shared.ids import DIGEST_BYTES
from shared.prompt_chain import block_digests

MOST_BYTES = 32 * 2**20
"""Room for some sixty prompts of 130,000 tokens."""

LEAST_BLOCKS = 8
"""Hashing a shorter prompt takes less time than the lookup."""

STEP_BLOCKS = 16
"""Blocks compared at once: few enough for their copy to stay in the processor's cache."""

BLOCK_ENTRY_BYTES = 120
"""Approximate size of a block's digest as a dictionary key."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, packed, and the digests of its whole blocks."""

    tokens: bytes
    digests: bytes

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def nbytes(self) -> int:
        return len(self.tokens) + len(self.digests) + BLOCK_ENTRY_BYTES * self.blocks


class KnownPrompts:
    """Earlier prompts, to compare later ones with."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Keep prompts in up to ``most_bytes`` of memory; with 0 every prompt is hashed from its front."""
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._by_block: dict[bytes, int] = {}  # Number of the last prompt with that block.
        self._last = 0

    def block_digests(self, namespace: str, prompt: bytes, *, keep: bool) -> bytes:
        """Return the digests that :func:`shared.prompt_chain.block_digests` returns.

        If ``keep``, later prompts are compared with this one.
        """
        size = prompt_chain.BLOCK_BYTES
        blocks = len(prompt) // size
        if blocks < LEAST_BLOCKS:
            return block_digests(namespace, prompt)
        digests, at = b"", 0
        continued: tuple[int, _Prompt] | None = None
        while at < blocks:
            block = prompt[at * size : (at + 1) * size]
            digests += block_digests(namespace, block, above=digests[-DIGEST_BYTES:])
            at += 1
            found = self._with_front(digests)
            if found is not None:
                known = found[1]
                at = _common_blocks(known, prompt, at, blocks)
                digests += known.digests[len(digests) : at * DIGEST_BYTES]
                continued = found if at == known.blocks else None
        if keep:
            self._keep(_Prompt(prompt, digests), continued)
        return digests

    def _with_front(self, digests: bytes) -> tuple[int, _Prompt] | None:
        """Return the last prompt that begins with these blocks, and its number, or None."""
        with self._lock:
            number = self._by_block.get(digests[-DIGEST_BYTES:], 0)
            if not number:
                return None
            self._prompts.move_to_end(number)
            return number, self._prompts[number]

    def _keep(self, prompt: _Prompt, continued: tuple[int, _Prompt] | None) -> None:
        """Keep the prompt in place of the one that it continues, unless there is none or another thread replaced it."""
        with self._lock:
            number, before = continued or (0, None)
            if before is not None and self._prompts.get(number) is before:
                self.nbytes -= before.nbytes
                known = before.blocks
            else:
                number = self._last = self._last + 1
                known = 0
            self._by_block.update(dict.fromkeys(_digests(prompt, known), number))
            self._prompts[number] = prompt
            self.nbytes += prompt.nbytes
            while self.nbytes > self._most_bytes:
                self._drop(next(iter(self._prompts)))

    def _drop(self, number: int) -> None:
        prompt = self._prompts.pop(number)
        self.nbytes -= prompt.nbytes
        for digest in _digests(prompt):
            if self._by_block.get(digest) == number:
                del self._by_block[digest]


def _common_blocks(known: _Prompt, prompt: bytes, at: int, blocks: int) -> int:
    """Return how many leading blocks are equal, given that the first ``at`` are."""
    size, most, step = prompt_chain.BLOCK_BYTES, min(known.blocks, blocks), STEP_BLOCKS
    while at < most:
        end = min(at + step, most)
        if prompt.startswith(known.tokens[at * size : end * size], at * size):
            at = end
        elif step == 1:
            break
        else:
            step = 1
    return at


def _digests(prompt: _Prompt, first: int = 0) -> list[bytes]:
    """Return the digests of the prompt's blocks from ``first`` on."""
    digests = prompt.digests
    return [digests[start : start + DIGEST_BYTES] for start in range(first * DIGEST_BYTES, len(digests), DIGEST_BYTES)]
