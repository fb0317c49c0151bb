"""The end of the prefix with its first tokens: blind to importance, and the cheapest of all."""

from __future__ import annotations

import torch

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.selection import Budget

FIRST_TOKENS = 4
"""Kept with the most recent ones, because models put attention there that they have no other use for."""


class Recent:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def choose(self, view: LayerView) -> list[Chosen]:
        choice = self._budget.over(view.start, view.end)
        count = choice.count + len(choice.kept)
        first = min(FIRST_TOKENS, count // 2)
        tokens = torch.cat(
            [torch.arange(view.start, view.start + first), torch.arange(view.end - count + first, view.end)]
        )
        return [Chosen(tokens[None], count / view.tokens) for _ in view.numbers]
