"""IMPRESS (section 4.3): the votes of a few probe heads choose one set for all heads of a layer, if they agree.

They agree when their sets are more alike than by chance; otherwise the layer falls back to consulting every head.

The identification itself is the worker's own, so that the evaluation is of the code that serves.
"""

from __future__ import annotations

from services.worker.evaluation.methods.all_heads import all_heads_read
from services.worker.evaluation.selection import Chosen, LayerView
from services.worker.importance.identification import ProbeHeads, choose_by_head, heads_read, identify
from services.worker.importance.metrics import Metric
from services.worker.importance.selection import Budget


class VotedByProbes:
    """Selection by a few probe heads if they agree, else by all heads."""

    def __init__(self, budget: Budget, metric: Metric, probes: ProbeHeads, alpha: float) -> None:
        """Choose as many tokens as ``budget`` says, by the scores of ``metric`` and the votes of ``probes``.

        The probe heads agree if their sets are more alike than the similarity expected by chance, raised to ``alpha``,
        or equal.
        """
        self._budget, self._metric, self._probes, self._alpha = budget, metric, probes, alpha

    def choose(self, view: LayerView) -> list[Chosen]:
        """Choose one set for all heads where the probe heads agree, else a set for each KV head."""
        choice = self._budget.over(view.start, view.end)
        units = self._probes.units(view.query_heads, view.kv_heads)
        probe_keys = len(heads_read(units)) / (2 * view.kv_heads)
        chosen = []
        for place in range(len(view.numbers)):
            found = identify(view.importance(place, self._metric, units), view.start, choice, self._alpha)
            if found.accepted:
                # The paper counts K and V of the chosen in full, the keys of the probe heads a second time.
                chosen.append(Chosen(found.tokens[None], probe_keys + len(found.tokens) / view.tokens))
            else:
                tokens = choose_by_head(view.importance(place, self._metric), view.start, choice)
                chosen.append(Chosen(tokens, all_heads_read(tokens.shape[1], view.tokens), fell_back=True))
        return chosen
