"""How important a prefix token is, from the attention weights that the request's own tokens give it. One name a metric.

IMPRESS (4.1) takes H2O's: the sum of the token's column of the attention weights. It leaves room for others, and which
one is right depends on the model, so it is a setting. Weights come in blocks of query rows, in order, so that no metric
needs the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn.functional import avg_pool1d

from shared.errors import ConfigError

POOLED_TOKENS = 9
"""Neighbours, the token itself included, that ``pooled`` averages over."""


class Metric(Protocol):
    """Stateless: the importance so far goes in and comes out."""

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return importance float32 ``[units, tokens]`` after one more block of ``weights`` float32 ``[units, group,
        rows, tokens]``; all zero before the first. ``group`` are the query heads that count as one unit.
        """

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return what is compared, of the same shape."""


class ColumnSum:
    """``h2o``: the sum of the column."""

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return importance + weights.sum(dim=(1, 2))

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        return importance


class LastRow:
    """``last``: what the last query token gives, summed over the group. It is the one whose successor is asked for."""

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights[:, :, -1].sum(dim=1)

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        return importance


class ColumnMax:
    """``max``: the most that any query token gives, so that many lukewarm rows do not outvote a single sure one."""

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.maximum(importance, weights.amax(dim=(1, 2)))

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        return importance


class Pooled:
    """Another metric, averaged over neighbouring tokens: a fact is a few tokens, and its value follows its name."""

    def __init__(self, plain: Metric) -> None:
        self._plain = plain

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._plain.fold(importance, weights)

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        scores = self._plain.finish(importance)
        # Where fewer neighbours exist they are what is averaged over: the ends of a prefix must not lose by it.
        return avg_pool1d(scores[:, None], POOLED_TOKENS, 1, POOLED_TOKENS // 2, count_include_pad=False)[:, 0]


METRICS: Mapping[str, Metric] = {
    "h2o": ColumnSum(),
    "last": LastRow(),
    "max": ColumnMax(),
    "h2o_pooled": Pooled(ColumnSum()),
    "last_pooled": Pooled(LastRow()),
    "max_pooled": Pooled(ColumnMax()),
}


def metric_named(name: str) -> Metric:
    """Return the metric of a name. Raises ConfigError, with the names that exist, for one that does not."""
    if name not in METRICS:
        raise ConfigError(f"there is no importance metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]
