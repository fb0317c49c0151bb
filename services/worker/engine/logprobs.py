"""Log-probabilities as clients see them.

They are of the model's own distribution: log_softmax of the raw logits, before penalties, biases, temperature
and filters (vLLM's "raw_logprobs"). So a greedy and a sampled request get the same figures for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.messages.tokens import TokenLogprob

IMPOSSIBLE = -9999.0
"""Stands for a probability of zero, whose logarithm JSON cannot carry; OpenAI uses the same number."""


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprob]:
    """Return the logprobs of each row's token and of the most likely tokens there.

    Row r of ``logits`` float32 [R, vocab] gives that of ``tokens[r]`` and of the ``counts[r]`` most likely tokens, most
    likely first, smaller ids first among equals. If ``ranked``, each has its token's rank in this order.
    """
    if not len(tokens):
        return []
    logprobs = torch.log_softmax(logits, dim=-1).clamp_min(IMPOSSIBLE)
    wanted = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    chosen = logprobs.gather(1, wanted)
    ids, values = _most_likely(logprobs, min(max(counts), logits.shape[1]))
    ranks = _ranks(logprobs, wanted, chosen) if ranked else [0] * len(tokens)
    return [
        TokenLogprob(
            token=int(token), logprob=logprob, top=tuple(zip(top_ids[:count], top_values, strict=False)), rank=rank
        )
        for token, logprob, top_ids, top_values, count, rank in zip(
            tokens, chosen[:, 0].tolist(), ids.tolist(), values.tolist(), counts, ranks, strict=True
        )
    ]


def _ranks(logprobs: torch.Tensor, wanted: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """Return the place from 1 of each row's token ``wanted`` [R, 1], whose logprob is ``chosen`` [R, 1]."""
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    before = (logprobs > chosen) | ((logprobs == chosen) & (ids < wanted))
    ranks: list[int] = (before.sum(dim=1) + 1).tolist()
    return ranks


def _most_likely(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and values of the ``count`` largest of each row, both [R, count]."""
    if count == 0:
        empty = logprobs[:, :0]
        return empty.to(torch.int64), empty
    # topk does not say which of equal values it takes, so take its boundary and settle ties by id.
    least = logprobs.topk(count, dim=1).values[:, -1:]
    ties = logprobs == least
    room = count - (logprobs > least).sum(dim=1, keepdim=True)
    keep = (logprobs > least) | (ties & (ties.cumsum(dim=1) <= room))
    ids = keep.nonzero()[:, 1].view(-1, count)
    values, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values
