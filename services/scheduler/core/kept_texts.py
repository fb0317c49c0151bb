"""The scheduler's mirror of the texts that each worker keeps of admissions, so that the next one sends only new tokens.

A worker executes its plans (:class:`shared.kept_texts.KeptTexts`) in order and each once, so the two are always equal.
Every admission whose prompt has a whole block (:mod:`shared.prompt_chain`) is kept, and takes the place of the text
that it continues. Beyond the number of tokens that the worker allows, the texts kept first are dropped; a used text is
kept again as a new one, so these are the least recently used.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, compress
from struct import Struct

import msgspec

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.require import require
from shared import prompt_chain
from shared.ids import DIGEST_BYTES
from shared.messages.worker_plans import TextBase

_DIGEST = Struct(f"{DIGEST_BYTES}s")


class KeptText(msgspec.Struct):
    """A kept text: its number of tokens, the digests of its prompt's whole blocks, and its page table, packed.

    ``behind`` has the digests of the blocks that its answer completed, which the worker does not keep.
    """

    tokens: int
    blocks: bytes
    pages: bytes
    behind: bytes = b""

    @property
    def known_tokens(self) -> int:
        """Number of leading tokens that an admission can refer to."""
        return len(self.blocks) // DIGEST_BYTES * prompt_chain.BLOCK_TOKENS


class KeptTexts(msgspec.Struct):
    """The texts of one incarnation of a worker.

    ``by_block`` has for each block's digest the last text with that block, ``behind`` for each block behind a text the
    last text that it was noted for.
    """

    most_tokens: int = 0  # As the worker said; 0: it keeps no texts.
    tokens: int = 0
    last: int = 0  # Number of the last text.
    texts: dict[int, KeptText] = {}  # In the order in which they were kept.
    by_block: dict[bytes, int] = {}
    dropped: list[int] = []  # Texts that the worker is to drop, not sent yet.
    behind: dict[bytes, int] = {}


class Reference(msgspec.Struct, frozen=True):
    """The references of an admission to kept texts, see ``AdmitRequest``."""

    base: TextBase | None = None
    text: int = 0
    dropped: tuple[int, ...] = ()


NO_REFERENCE = Reference()


def refer(kept: KeptTexts, blocks: bytes, tokens: int, pages: bytes) -> Reference:
    """Return the reference for an admitted request with these ``tokens``, and keep its text.

    ``blocks`` are the digests of its prompt's whole blocks (16 bytes each), ``pages`` is its page table. From now on
    the worker keeps the new text, and lacks the dropped ones.
    """
    if not blocks:
        return NO_REFERENCE
    base = _base(kept, blocks, pages)
    text = 0
    if tokens <= kept.most_tokens:
        if base is not None and kept.texts[base.text].known_tokens == base.tokens:
            _drop(kept, base.text)
        text = kept.last = kept.last + 1
        kept.texts[text] = KeptText(tokens, blocks, pages)
        kept.by_block.update(dict.fromkeys(_digests(blocks), text))
        kept.tokens += tokens
        while kept.tokens > kept.most_tokens:
            _drop(kept, next(iter(kept.texts)))
    dropped, kept.dropped = tuple(kept.dropped), []
    return Reference(base, text, dropped)


def all_digests(kept: KeptTexts, digests: bytes, above: int) -> bytes:
    """Return the digests of all whole blocks of a prompt; the first ``above`` are not among ``digests``.

    b"" where no text has them. Changes nothing.
    """
    if not above:
        return digests
    for end in range(len(digests), 0, -DIGEST_BYTES):
        number = kept.by_block.get(digests[end - DIGEST_BYTES : end])
        if number is not None:
            return kept.texts[number].blocks[: above * DIGEST_BYTES] + digests
    # The next turn of a session refers to blocks that its last answer completed.
    first = digests[:DIGEST_BYTES]
    number = kept.behind.get(first)
    if number is None:
        return b""
    text = kept.texts[number]
    between = _digests(text.behind).index(first)
    return text.blocks[: (above - between) * DIGEST_BYTES] + text.behind[: between * DIGEST_BYTES] + digests


def note_behind(kept: KeptTexts, last: bytes, behind: bytes) -> None:
    """Note the blocks ``behind`` that an answer completed; the prompt's last whole block has the digest ``last``."""
    number = kept.by_block.get(last)
    if number is None or not behind:
        return
    text = kept.texts[number]
    _forget_behind(kept, number)
    text.behind = behind
    kept.behind.update(dict.fromkeys(_digests(behind), number))


def forget_texts(kept: KeptTexts) -> None:
    """Rely on none of the worker's texts; the next admission tells it to drop them."""
    kept.dropped += kept.texts
    kept.texts, kept.by_block, kept.behind, kept.tokens = {}, {}, {}, 0


def _base(kept: KeptTexts, blocks: bytes, pages: bytes) -> TextBase | None:
    """Return the longest leading part of a prompt that the worker keeps, with its number of equal pages, or None."""
    for end in range(len(blocks), 0, -DIGEST_BYTES):
        number = kept.by_block.get(blocks[end - DIGEST_BYTES : end])
        if number is not None:
            shared_tokens = end // DIGEST_BYTES * prompt_chain.BLOCK_TOKENS
            return TextBase(text=number, tokens=shared_tokens, pages=_same_pages(kept.texts[number].pages, pages))
    return None


def _same_pages(one: bytes, other: bytes) -> int:
    """Return how many leading page numbers are equal."""
    low, high = 0, min(len(one), len(other)) // PAGE_NUMBER_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * PAGE_NUMBER_BYTES, middle * PAGE_NUMBER_BYTES)
        if one[span] == other[span]:
            low = middle
        else:
            high = middle - 1
    return low


def _forget_behind(kept: KeptTexts, number: int) -> None:
    for digest in _digests(kept.texts[number].behind):
        if kept.behind.get(digest) == number:
            del kept.behind[digest]


def _drop(kept: KeptTexts, number: int) -> None:
    _forget_behind(kept, number)
    text = kept.texts.pop(number)
    kept.tokens -= text.tokens
    digests = _digests(text.blocks)
    last = map(kept.by_block.__getitem__, digests)
    its = list(compress(digests, map(number.__eq__, last)))  # Blocks of the others have a later text.
    deque(map(kept.by_block.pop, its), maxlen=0)
    kept.dropped.append(number)


def _digests(blocks: bytes) -> list[bytes]:
    return list(chain.from_iterable(_DIGEST.iter_unpack(blocks)))


def check_texts(name: str, kept: KeptTexts) -> None:
    """Raise InvariantViolated if the mirror of a worker contradicts itself."""
    require(kept.tokens == sum(text.tokens for text in kept.texts.values()), f"{name}'s texts are miscounted")
    require(kept.tokens <= kept.most_tokens, f"{name} is to keep more than it said")
    last: dict[bytes, int] = {}
    for number, text in kept.texts.items():
        require(number <= kept.last, f"{name}'s text {number} was not kept yet")
        require(text.known_tokens <= text.tokens, f"{name}'s text {number} is shorter than its blocks")
        last.update(dict.fromkeys(_digests(text.blocks), number))
    require(kept.by_block == last, f"blocks of {name}'s texts are not found")
    for digest, number in kept.behind.items():
        is_there = number in kept.texts and digest in _digests(kept.texts[number].behind)
        require(is_there, f"a block behind {name}'s text {number} is not behind it")
    require(not set(kept.dropped) & set(kept.texts), f"{name} is to drop what it keeps")
