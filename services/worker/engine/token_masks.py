"""Masks of the tokens that a grammar allows: 32 tokens an int32 word, token t in bit ``t % 32`` of word ``t // 32``."""

from __future__ import annotations

from collections.abc import Sequence

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


def mask_logits(logits: torch.Tensor, masks: Sequence[Words]) -> None:
    """Ban in row r of ``logits`` float32 [R, vocab], in place, every token that ``masks[r]`` does not allow."""
    vocab_size = logits.shape[1]
    words = np.stack(masks)
    if logits.device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
        return
    (sent,) = upload([words], logits.device)
    logits.masked_fill_(banned_by(sent, vocab_size), float("-inf"))


def banned_by(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What ``words`` int32 [R, W] do not allow of the first ``vocab_size`` tokens: bool [R, vocab_size]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> places) & 1).view(len(words), -1)[:, :vocab_size] == 0
