"""Masks of the tokens that a grammar allows: 32 tokens an int32 word, token t in bit ``t % 32`` of word ``t // 32``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.uploads import upload

Words = npt.NDArray[np.int32]


def without(words: Words, tokens: Sequence[int]) -> Words:
    """The mask less ``tokens``, or the mask itself where nothing would be left: the grammar outweighs them."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[[token for token in tokens if 0 <= token < len(bits)]] = 0
    less = np.packbits(bits, bitorder="little").view(np.int32)
    return less if less.any() else words


def allowed_ids(words: Words, vocab_size: int) -> npt.NDArray[np.int64]:
    """Ascending ids below ``vocab_size`` that a mask allows."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_))


def ban_others(logits: torch.Tensor, masks: Mapping[int, Words]) -> torch.Tensor:
    """A copy of ``logits`` float32 [R, vocab] in which row r keeps what ``masks[r]`` allows; other rows stay."""
    rows = np.fromiter(masks, dtype=np.int64, count=len(masks))
    words, which = upload([np.stack(list(masks.values())), rows], logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> places) & 1).view(len(words), -1)[:, : logits.shape[1]]
    banned = logits.clone()
    banned[which] = banned[which].masked_fill_(allowed == 0, float("-inf"))
    return banned
