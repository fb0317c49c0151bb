"""The end of the prefix with its first tokens: ignores importance, and is the cheapest of all."""

from __future__ import annotations

import torch

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.selection import Budget

FIRST_TOKENS = 4
"""Tokens kept beside the most recent ones, because models put attention there that has no other target."""


class Recent:
    """Selection by position alone, with as many tokens as the other methods."""

    def __init__(self, budget: Budget) -> None:
        """Take from ``budget`` only how many tokens to choose, not which ones it always keeps."""
        self._budget = budget

    def choose(self, view: LayerView) -> list[Chosen]:
        """Choose the first ``FIRST_TOKENS`` tokens (at most half of the budget) and the last ones, for all heads."""
        choice = self._budget.over(view.start, view.end)
        count = choice.count + len(choice.kept)
        first = min(FIRST_TOKENS, count // 2)
        tokens = torch.cat(
            [torch.arange(view.start, view.start + first), torch.arange(view.end - count + first, view.end)]
        )
        return [Chosen(tokens[None], count / view.tokens) for _ in view.numbers]
