"""Static pre-identification (IMPRESS section 3.2): tokens that mattered to other questions about a prefix are kept.

No question may choose for itself here, so the questions are two halves, even and odd: the tokens that one half found
important, with the whole prefix before it, are those from which the other half is answered.
"""

from __future__ import annotations

import torch

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.identification import choose_by_head
from services.worker.importance.metrics import Metric
from services.worker.importance.selection import Budget, Choice
from shared.errors import InvalidRequest


class Recorder:
    """A selection that keeps the full prefix and records importance. Let it see all questions about a prefix first."""

    def __init__(self, metric: Metric) -> None:
        """Begin with no record; ``metric`` scores the tokens."""
        self._metric = metric
        self._sums: dict[tuple[int, int], torch.Tensor] = {}  # Sums by layer and half: [kv_heads, tokens].

    def choose(self, view: LayerView) -> list[Chosen]:
        """Add the importance of this layer's tokens to the sums of each question's half; choose the whole prefix."""
        for place, number in enumerate(view.numbers):
            importance, key = view.importance(place, self._metric), (view.layer, number % 2)
            self._sums[key] = self._sums[key] + importance if key in self._sums else importance
        return [Chosen(None, 1.0) for _ in view.numbers]

    def without(self, number: int, layer: int) -> torch.Tensor:
        """Return importance, float32 [kv_heads, tokens], summed over the half without question ``number``.

        Raises InvalidRequest when that half is empty.
        """
        recorded = self._sums.get((layer, 1 - number % 2))
        if recorded is None:
            raise InvalidRequest("static pre-identification needs two questions at least about each prefix")
        return recorded


class Static:
    """Selection of one fixed set for each half of the questions, layer and KV head."""

    def __init__(self, budget: Budget, recorded: Recorder) -> None:
        """Choose as many tokens as ``budget`` says; ``recorded`` has seen all questions about the prefix."""
        self._budget, self._recorded = budget, recorded

    def choose(self, view: LayerView) -> list[Chosen]:
        """Choose for each question the set recorded from the other half."""
        choice = self._budget.over(view.start, view.end)
        sets = {half: self._tokens(half, view, choice) for half in sorted({number % 2 for number in view.numbers})}
        return [Chosen(sets[number % 2], sets[number % 2].shape[1] / view.tokens) for number in view.numbers]

    def _tokens(self, half: int, view: LayerView, choice: Choice) -> torch.Tensor:
        return choose_by_head(self._recorded.without(half, view.layer), view.start, choice)
