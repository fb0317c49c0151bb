"""Masks of the tokens that a grammar allows: 32 tokens an int32 word, token t in bit ``t % 32`` of word ``t // 32``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.uploads import upload

Words = npt.NDArray[np.int32]

_WORD_BITS = 32
_FEW = 8
"""Where at most one word in so many allows a token, which is usual, it is cheaper to read those words alone."""


def without(words: Words, tokens: Sequence[int]) -> Words:
    """Return the mask less ``tokens``, or the mask itself where nothing would be left: the grammar takes precedence."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[[token for token in tokens if 0 <= token < len(bits)]] = 0
    less = np.packbits(bits, bitorder="little").view(np.int32)
    return less if less.any() else words


def allowed_ids(masks: Sequence[Words], vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens below ``vocab_size`` that R masks allow.

    They are ascending ids, plus ``r * vocab_size`` for those of mask r; and edges [R + 1]: mask r has the ids from
    ``edges[r]`` to ``edges[r + 1]``.
    """
    words = _stack(masks, vocab_size)
    padded = words.shape[1] * _WORD_BITS
    words[:, -1] &= _below(vocab_size % _WORD_BITS)
    some = np.flatnonzero(words)
    if len(some) > words.size // _FEW:
        ids = _set_bits(words)
    else:
        bits = _set_bits(words.reshape(-1)[some])
        ids = (some[bits >> 5] << 5) + (bits & 31)
    edges = ids.searchsorted(np.arange(len(words) + 1) * padded)
    if padded != vocab_size:
        ids -= (np.arange(len(words)) * (padded - vocab_size)).repeat(np.diff(edges))
    return ids, edges


def ban_others(logits: torch.Tensor, masks: Mapping[int, Words]) -> torch.Tensor:
    """Return a copy of ``logits`` float32 [R, vocab] in which row r keeps the tokens that ``masks[r]`` allows.

    Other rows are unchanged.
    """
    rows = np.fromiter(masks, dtype=np.int64, count=len(masks))
    words, which = upload([_stack(list(masks.values()), logits.shape[1]), rows], logits.device)
    places = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> places) & 1).view(len(words), -1)[:, : logits.shape[1]]
    banned = logits.clone()
    banned[which] = banned[which].masked_fill_(allowed == 0, float("-inf"))
    return banned


def _stack(masks: Sequence[Words], vocab_size: int) -> Words:
    """Return the words of all masks that cover the vocabulary, a copy.

    A tokenizer may know more tokens than logits have columns.
    """
    return np.stack([mask[: -(-vocab_size // _WORD_BITS)] for mask in masks])


def _set_bits(words: Words) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_))


def _below(count: int) -> np.int32:
    """Return the word whose lowest ``count`` tokens are set; all of them for 0."""
    return np.int32((1 << count) - 1 if count else -1)
