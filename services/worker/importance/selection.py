"""From scores to sorted sets of tokens: their number, tokens that are always kept, and ties. Pure.

IMPRESS and HyperInfer keep a ratio of the prefix and nothing regardless of its score; H2O keeps recent tokens too, and
others the first ones. Both are possible here and neither is the default. Tokens that are kept regardless count towards
the ratio, but not when heads are compared: sets that share unchosen tokens would look alike without being so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """What is left to choose in one layer. Tokens are positions in the prefix, int64 and ascending.

    ``kept`` are in every set; ``count`` of ``candidates`` are to be added to them.
    """

    kept: torch.Tensor
    candidates: torch.Tensor
    count: int

    def with_kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` int64 ``[..., count]`` and what is kept, sorted: ``[..., count + len(kept)]``."""
        kept = self.kept.to(tokens.device).expand(*tokens.shape[:-1], -1)
        return torch.cat([kept, tokens], dim=-1).sort(dim=-1).values


@dataclass(frozen=True, slots=True)
class Budget:
    """``ratio`` of the visible prefix tokens is loaded, rounded up; ``first`` and ``recent`` tokens in any case.

    Where there is room for ``most_tokens`` only, no more are kept: the first ones, then the most recent.
    """

    ratio: float
    first_tokens: int = 0
    recent_tokens: int = 0
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a ratio outside of (0, 1] and for negative numbers of tokens."""
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"the ratio of tokens to load must be above 0 and at most 1, not {self.ratio}")
        if self.first_tokens < 0 or self.recent_tokens < 0:
            raise ConfigError("the numbers of first and recent tokens to load cannot be negative")

    def over(self, start: int, end: int) -> Choice:
        """Return the choice among tokens ``[start, end)``, those of a prefix that the layer can see.

        ``first_tokens`` are the first of the request: behind a sliding window, or where the beginning is there
        anyhow, there are none left.
        """
        tokens = torch.arange(start, end)
        room = len(tokens) if self.most_tokens is None else min(len(tokens), self.most_tokens)
        first = min(room, max(0, self.first_tokens - start))
        recent = min(room - first, self.recent_tokens)
        is_kept = (tokens < start + first) | (tokens >= end - recent)
        wanted = tokens_loaded(self.ratio, end - start)
        kept, candidates = tokens[is_kept], tokens[~is_kept]
        return Choice(kept, candidates, min(len(candidates), max(0, wanted - len(kept))))


def tokens_loaded(ratio: float, tokens: int) -> int:
    """Return ``ratio`` of ``tokens``, rounded up."""
    # A product such as 0.07 * 100 lies just above the whole number that is meant.
    return math.ceil(ratio * tokens - 1e-9)


def most_important(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the ``count`` largest of each row of ``scores`` ``[units, n]``, int64 ``[units, count]``, ascending.

    Of equal scores the lower column wins, whatever the device.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def vote(sets: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the ``count`` columns that most rows of ``sets`` hold, int64 ``[count]``, ascending.

    sets int64 ``[units, count]``, of columns of scores ``[units, n]``. IMPRESS says only that the token is "deemed most
    important by all probe heads" and that they vote: here votes decide, then the sum of the scores, then the lower
    column.
    """
    ballots = scores.new_zeros(scores.shape[-1])
    ballots.index_add_(0, sets.flatten(), ballots.new_ones(sets.numel()))
    by_score = torch.sort(scores.sum(dim=0), descending=True, stable=True).indices
    by_votes = torch.sort(ballots[by_score], descending=True, stable=True).indices
    return by_score[by_votes[: sets.shape[-1]]].sort().values
