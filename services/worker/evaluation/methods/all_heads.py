"""H2O over a stored prefix (IMPRESS section 6.1): all keys are read, and every KV head keeps what matters to it."""

from __future__ import annotations

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.identification import choose_by_head
from services.worker.importance.metrics import Metric
from services.worker.importance.selection import Budget


class AllHeads:
    def __init__(self, budget: Budget, metric: Metric) -> None:
        self._budget, self._metric = budget, metric

    def choose(self, view: LayerView) -> list[Chosen]:
        choice = self._budget.over(view.start, view.end)
        importances = (view.importance(place, self._metric) for place in range(len(view.numbers)))
        sets = [choose_by_head(importance, view.start, choice) for importance in importances]
        return [Chosen(tokens, all_heads_read(tokens.shape[1], view.tokens)) for tokens in sets]


def all_heads_read(count: int, tokens: int) -> float:
    """All keys to choose by, then V of the ``count`` that are chosen: their keys are there already."""
    return (tokens + count) / (2 * tokens)
