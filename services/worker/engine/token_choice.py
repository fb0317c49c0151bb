"""Choosing a token from logits by inverse transform sampling, in exact integer arithmetic.

Weights are ``floor(exp((x - max) / temperature) * 2**35)`` as int64. Integer sums do not depend on their order, so
neither the size of the batch, nor the device's way to add, nor the number of threads can move a boundary
between two tokens: a row gives the same token alone and in any batch. 2**35 keeps the sum of 2**18 tokens below
2**53, where it is exact as a double; tokens less likely than the likeliest by 2**-35 (3e-11) are never chosen.

Filters apply in the order of vLLM: min-p, then top-k, then top-p over what is left. Where equal weights straddle
a filter's boundary, smaller token ids stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.messages.requests import SamplingParams

WEIGHT_ONE = 2**35
_TOP_P_CANDIDATES = 1024


def choose(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """One token for each row of ``logits`` float32 [R, vocab]; int64 [R].

    All rows have a positive temperature and a finite maximum. Row r gets the first token, in order of ids, at
    which the cumulative weight exceeds ``uniforms[r]`` of the whole.
    """
    weights = _weights(logits, _column([p.temperature for p in params], logits))
    if any(p.min_p > 0 for p in params):
        least = weights.amax(dim=1, keepdim=True) * _column([p.min_p for p in params], logits)
        weights.masked_fill_(weights < least, 0)
    filtered = [number for number, p in enumerate(params) if 0 < p.top_k < logits.shape[1] or p.top_p < 1]
    if filtered:
        which = torch.tensor(filtered, device=logits.device)
        chosen = [params[number] for number in filtered]
        weights[which] = _keep_heaviest(weights[which], chosen)
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    target = (total * _column(uniforms, logits)).floor().to(torch.int64)
    # The product may round up to the total itself.
    target = torch.minimum(target, total - 1)
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    # Doubles, because exp may differ in its last bit between the vectorised body and the tail of an array; at
    # 2**-52 that moves a 35-bit weight with probability 2**-17, and a choice with probability 2**-50.
    exponents = (logits - logits.amax(dim=1, keepdim=True)).to(torch.float64).div_(temperature)
    return exponents.exp_().mul_(WEIGHT_ONE).to(torch.int64)


def _keep_heaviest(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero all weights beyond each row's top-k and top-p."""
    vocab_size = weights.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    # Without top-k, guess how many tokens make up top-p; a wrong guess costs another round, never another result.
    wanted = max(limit if limit < vocab_size else _TOP_P_CANDIDATES for limit in limits)
    top_k = torch.tensor(limits, device=weights.device)[:, None]
    top_p = _column([p.top_p for p in params], weights)
    while True:
        heaviest = weights.topk(min(wanted, vocab_size), dim=1).values
        counts, complete = _count_kept(heaviest, weights.sum(dim=1, keepdim=True), top_k, top_p)
        if complete or wanted >= vocab_size:
            return _zero_beyond(weights, heaviest, counts)
        wanted *= 16


def _count_kept(
    heaviest: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """How many of the heaviest weights (descending, [R, n]) each row keeps, [R, 1]; and whether n was enough."""
    candidates = heaviest.shape[1]
    within_k = torch.arange(candidates, device=heaviest.device) < top_k
    cumulative = heaviest.cumsum(dim=1)
    in_k = torch.where(top_k > candidates, total, (heaviest * within_k).sum(dim=1, keepdim=True))
    # Top-p keeps a token while the tokens before it have less than p; so the first always stays.
    kept = within_k & ((cumulative - heaviest) < in_k * top_p)
    kept[:, 0] = True
    counts = kept.sum(dim=1, keepdim=True)
    short = (counts == candidates) & (top_k > candidates)
    return counts, not bool(short.any())


def _zero_beyond(weights: torch.Tensor, heaviest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    least = heaviest.gather(1, counts - 1)
    ties = weights == least
    room = counts - (weights > least).sum(dim=1, keepdim=True)
    keep = (weights > least) | (ties & (ties.cumsum(dim=1) <= room))
    return weights.masked_fill(~keep, 0)
