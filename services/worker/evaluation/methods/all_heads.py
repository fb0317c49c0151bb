"""H2O over a stored prefix (IMPRESS section 6.1): all keys are read, and every KV head keeps what matters to it."""

from __future__ import annotations

from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.identification import choose_by_head
from services.worker.importance.metrics import Metric
from services.worker.importance.selection import Budget


class AllHeads:
    """Selection by the attention of all heads, for each KV head by itself, within a budget."""

    def __init__(self, budget: Budget, metric: Metric) -> None:
        """Choose as many tokens as ``budget`` says, by the scores of ``metric``."""
        self._budget, self._metric = budget, metric

    def choose(self, view: LayerView) -> list[Chosen]:
        """Choose for each question and KV head its most important tokens, int64 [kv_heads, k]."""
        choice = self._budget.over(view.start, view.end)
        importances = (view.importance(place, self._metric) for place in range(len(view.numbers)))
        sets = [choose_by_head(importance, view.start, choice) for importance in importances]
        return [Chosen(tokens, all_heads_read(tokens.shape[1], view.tokens)) for tokens in sets]


def all_heads_read(count: int, tokens: int) -> float:
    """Return the part of the KV that is read: all keys to choose by, then V of the ``count`` chosen tokens."""
    return (tokens + count) / (2 * tokens)
