"""Tokens drawn at random: the baseline of a budget without a choice."""

from __future__ import annotations

import hashlib

import torch

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.selection import Budget


class RandomTokens:
    """Tokens drawn again for each question and layer, whatever the batch."""

    def __init__(self, budget: Budget, seed: int) -> None:
        """Choose as many tokens as ``budget`` says; ``seed``, question and layer alone decide which."""
        self._budget, self._seed = budget, seed

    def choose(self, view: LayerView) -> list[Chosen]:
        """Draw one set for all heads of the layer, beside the tokens that the budget always keeps."""
        choice = self._budget.over(view.start, view.end)
        chosen = []
        for number in view.numbers:
            generator = torch.Generator().manual_seed(_seed_of(self._seed, number, view.layer))
            drawn = torch.randperm(len(choice.candidates), generator=generator)[: choice.count]
            tokens = choice.with_kept(choice.candidates[drawn])
            chosen.append(Chosen(tokens[None], len(tokens) / view.tokens))
        return chosen


def _seed_of(*numbers: int) -> int:
    """Return a seed below 2**63 that other numbers do not share."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
