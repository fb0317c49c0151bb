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

    @property
    def is_of_last_row(self) -> bool:
        """Whether only the last query token counts, so that no other row's weights are needed."""

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the importance, float32 ``[units, tokens]``, after one more block of ``weights``.

        It is all zero before the first block. weights is float32 ``[units, group, rows, tokens]``; ``group`` are the
        query heads that count as one unit.
        """

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return the scores to compare, of the same shape."""


class ColumnSum:
    """``h2o``: the sum of the column."""

    is_of_last_row = False

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add the sum over the block's rows and the group."""
        return importance + weights.sum(dim=(1, 2))

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return ``importance`` unchanged."""
        return importance


class LastRow:
    """``last``: the weights of the last query token, whose successor is computed, summed over the group."""

    is_of_last_row = True

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the last row's weights: the last block has the last query token."""
        return weights[:, :, -1].sum(dim=1)

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return ``importance`` unchanged."""
        return importance


class ColumnMax:
    """``max``: the largest weight that any query token gives, so that one sure row outweighs many weak ones."""

    is_of_last_row = False

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the larger of the maximum so far and the block's."""
        return torch.maximum(importance, weights.amax(dim=(1, 2)))

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return ``importance`` unchanged."""
        return importance


class Pooled:
    """Another metric, averaged over neighbouring tokens: a fact is a few tokens, and its value follows its name."""

    def __init__(self, plain: Metric) -> None:
        """Average the scores that ``plain`` gives."""
        self._plain = plain
        self.is_of_last_row = plain.is_of_last_row

    def fold(self, importance: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Fold by the other metric."""
        return self._plain.fold(importance, weights)

    def finish(self, importance: torch.Tensor) -> torch.Tensor:
        """Return the other metric's result, averaged over :data:`POOLED_TOKENS` neighbours."""
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
