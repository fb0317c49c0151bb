"""Choosing a token from logits by inverse transform sampling, in exact integer arithmetic.

Weights are ``exp((x - max) / temperature) * 2**30`` cut to int32. Integer sums do not depend on their order, so
neither the size of the batch, nor the device's way to add, nor the number of threads can move a boundary
between two tokens: a row gives the same token alone and in any batch. Tokens less likely than the likeliest by
2**-30 (1e-9) are never chosen; the sum over 2**18 tokens stays below 2**53, where it is exact as a double too.

Filters apply in the order of vLLM: min-p, then top-k, then top-p over what is left. Where equal weights straddle
a filter's boundary, smaller token ids stay.

Here all rows are chosen at once, for GPUs; :mod:`services.worker.engine.row_choice` chooses the same tokens on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.uploads import upload
from shared.messages.requests import SamplingParams

WEIGHT_ONE = 2**30
_BLOCK = 256
LEAST_TEMPERATURE = 1e-30
"""Still a normal float32. From far above it on, only tokens equal to the likeliest have any weight."""
TOP_P_CANDIDATES = 1024
"""Number of the heaviest tokens among which top-p is searched first."""


def choose(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Choose one token for each row of ``logits`` float32 [R, vocab], whose maxima are ``best`` [R]; return int64 [R].

    All rows have a positive temperature and a finite maximum. Row r gets the first token, in order of ids, at which the
    cumulative weight exceeds ``uniforms[r]`` of the whole. The host may read how many tokens are heavy.
    """
    return _choose(logits, best, params, uniforms, may_read=True)[0]


def choose_unread(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as :func:`choose`, with nothing read by the host, and tell which tokens are the same.

    The second result, bool [R] on the device, says whether the token is that of :func:`choose`. It may be another where
    top-p keeps more than ``TOP_P_CANDIDATES`` tokens, and no top-k bounds them.
    """
    return _choose(logits, best, params, uniforms, may_read=False)


def _choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    *,
    may_read: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size = logits.shape[1]
    weights = _weights(logits, best, params)
    if any(p.min_p > 0 for p in params):
        least = _column([p.min_p * WEIGHT_ONE for p in params], logits).ceil().to(torch.int32)
        weights.masked_fill_(weights < least, 0)
    is_complete = torch.ones(len(params), dtype=torch.bool, device=logits.device)
    filtered = [number for number, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if len(filtered) == len(params):
        weights, is_complete = _keep_heaviest(weights, params, may_read=may_read)
    elif filtered:
        (which,) = upload([np.array(filtered)], logits.device)
        kept = _keep_heaviest(weights[which], [params[number] for number in filtered], may_read=may_read)
        weights[which], is_complete[which] = kept
    return _invert(weights, _column(uniforms, logits)), is_complete


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    (column,) = upload([np.array(values, dtype=np.float64)], like.device)
    return column[:, None]


def _weights(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return int32 [R, vocab rounded up to whole blocks], zero beyond the vocabulary."""
    rows, vocab_size = logits.shape
    temperature = _column([max(p.temperature, LEAST_TEMPERATURE) for p in params], logits).to(torch.float32)
    scaled = (logits - best[:, None]).div_(temperature).exp_().mul_(WEIGHT_ONE)
    padded = -(-vocab_size // _BLOCK) * _BLOCK
    weights = torch.zeros(rows, padded, dtype=torch.int32, device=logits.device)
    weights[:, :vocab_size] = scaled
    return weights


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative weight exceeds its row's share ``uniforms`` [R, 1] of the total.

    It finds first the block, then the token in it, which is several times cheaper than one cumulative sum over all.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    edges = blocks.sum(dim=2).cumsum(dim=1)
    total = edges[:, -1:]
    # The product may round up to the total itself.
    target = torch.minimum((total * uniforms).floor().to(torch.int64), total - 1)
    block = torch.searchsorted(edges, target, right=True)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp_min(0)), 0)
    inside = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].cumsum(dim=1)
    return (block * _BLOCK + torch.searchsorted(inside, target - before, right=True))[:, 0]


def _keep_heaviest(
    weights: torch.Tensor, params: Sequence[SamplingParams], *, may_read: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weights`` with zeros beyond each row's top-k and top-p; and bool [R], whether all are found."""
    width = weights.shape[1]
    limits = [p.top_k if 0 < p.top_k < width else width for p in params]
    # Without top-k, guess how many tokens make up top-p; a wrong guess costs another round, never another result.
    wanted = max(limit if limit < width else TOP_P_CANDIDATES for limit in limits)
    top_k, top_p = _column(limits, weights), _column([p.top_p for p in params], weights)
    total = weights.sum(dim=1, keepdim=True)
    while True:
        heaviest = weights.topk(min(wanted, width), dim=1).values
        counts, is_short = _count_kept(heaviest, total, top_k, top_p)
        if wanted >= width or not may_read or not bool(is_short.any()):
            return _zero_beyond(weights, heaviest, counts), ~is_short
        wanted *= 16


def _count_kept(
    heaviest: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of the heaviest weights (descending, [R, n]) each row keeps, [R, 1].

    Return bool [R] besides, whether it may keep more than n.
    """
    candidates = heaviest.shape[1]
    within_k = torch.arange(candidates, device=heaviest.device) < top_k
    before = heaviest.cumsum(dim=1) - heaviest
    kept_by_k = torch.where(top_k > candidates, total, (heaviest * within_k).sum(dim=1, keepdim=True))
    # Top-p keeps a token while the tokens before it have less than p; so the first always stays.
    kept = within_k & (before < kept_by_k * top_p)
    kept[:, 0] = True
    counts = kept.sum(dim=1, keepdim=True)
    return counts, ((counts == candidates) & (top_k > candidates))[:, 0]


def _zero_beyond(weights: torch.Tensor, heaviest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``weights`` with zeros but for the ``counts`` [R, 1] heaviest of each row."""
    least = heaviest.gather(1, counts - 1)
    heavier, ties = weights > least, weights == least
    room = counts - heavier.sum(dim=1, keepdim=True)
    return weights.masked_fill(~(heavier | (ties & (ties.cumsum(dim=1) <= room))), 0)
