"""Choosing a token row by row, for CPUs: the tokens of :mod:`services.worker.engine.token_choice`, faster.

The weights are the same integers, so every sum is exact and the same token results. A row's weights fit in the L2 cache
where those of a batch do not, and a filter looks for what it keeps among the few heaviest tokens instead of ordering
all. Measured with one thread, 8 rows of 131,072 tokens and a top-p of 0.95: 3 ms in place of 23.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.token_choice import LEAST_TEMPERATURE, WEIGHT_ONE
from shared.messages.requests import SamplingParams

_BLOCK = 256
_FIRST_LEVEL = WEIGHT_ONE >> 8
"""Tokens of at least this weight are looked at first: those at most 256 times less likely than the likeliest."""


def choose_in_row(logits: npt.NDArray[np.float32], likeliest: int, params: SamplingParams, uniform: float) -> int:
    """Return the place of the token in one row of ``logits`` float32 [tokens].

    The token is chosen as by :func:`services.worker.engine.token_choice.choose`. ``likeliest`` is the place of the
    largest logit.
    """
    row = torch.from_numpy(logits)
    temperature = torch.tensor([max(params.temperature, LEAST_TEMPERATURE)], dtype=torch.float32)
    scaled = (row - row[likeliest]).div_(temperature).exp_().mul_(WEIGHT_ONE)
    return choose_by_weight(scaled.to(torch.int32).numpy(), params, uniform)


def keeps_all(params: SamplingParams, tokens: int) -> bool:
    """Return whether no filter removes any of ``tokens`` tokens that have a weight."""
    return math.ceil(params.min_p * WEIGHT_ONE) <= 1 and not 0 < params.top_k < tokens and params.top_p >= 1


def choose_by_weight(weights: npt.NDArray[np.int32], params: SamplingParams, uniform: float) -> int:
    """Return the place of the token in one row of ``weights`` int32 [tokens]; the largest weight is WEIGHT_ONE."""
    if keeps_all(params, len(weights)):
        return _find_among_all(weights, uniform)
    least = math.ceil(params.min_p * WEIGHT_ONE)
    top_k = params.top_k if 0 < params.top_k < len(weights) else len(weights)
    if least > 1:
        ids = np.flatnonzero(weights >= least)
        total = int(weights[ids].sum(dtype=np.int64))
    else:
        total = int(weights.sum(dtype=np.int64))
        ids = _find_candidates(weights, total, top_k, params.top_p)
    ids, heavy = _keep_heaviest(ids, weights[ids].astype(np.int64), total, top_k, params.top_p)
    edges = heavy.cumsum()
    return int(ids[edges.searchsorted(target_weight(int(edges[-1]), uniform), side="right")])


def target_weight(total: int, uniform: float) -> int:
    """Return the target: the first token whose cumulative weight exceeds it is chosen."""
    # The product may round up to the total itself.
    return min(math.floor(total * uniform), total - 1)


def _find_among_all(weights: npt.NDArray[np.int32], uniform: float) -> int:
    """Find first the block, then the token in it, which is several times cheaper than one cumulative sum over all."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.int64)
    edges = sums.cumsum()
    target = target_weight(int(edges[-1]), uniform)
    block = int(edges.searchsorted(target, side="right"))
    before = int(edges[block - 1]) if block else 0
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.int64)
    return block * _BLOCK + int(inside.searchsorted(target - before, side="right"))


def _find_candidates(weights: npt.NDArray[np.int32], total: int, top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Return ascending ids of all tokens from some weight on, with everything that the filters keep among them."""
    level = _FIRST_LEVEL
    while True:
        ids = np.flatnonzero(weights >= level)
        # Too low a guess costs another round, never another result.
        if level == 1 or len(ids) >= top_k:
            return ids
        if top_k == len(weights) and int(weights[ids].sum(dtype=np.int64)) >= total * top_p:
            return ids
        level = max(1, level >> 6)


def _keep_heaviest(
    ids: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], total: int, top_k: int, top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the candidates that top-k keeps, and of those the ones that top-p keeps, with their weights.

    Smaller ids stay among equal weights. Ids ascend.
    """
    order = np.argsort(-weights, kind="stable")[:top_k]
    heaviest = weights[order]
    kept_by_k = total if len(order) < top_k else int(heaviest.sum())
    before = heaviest.cumsum() - heaviest
    # Top-p keeps a token while the tokens before it have less than p; so the first always stays.
    count = max(1, int(np.count_nonzero(before < kept_by_k * top_p)))
    kept = np.sort(order[:count])
    return ids[kept], weights[kept]
