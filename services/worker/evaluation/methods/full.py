"""The whole prefix, as recomputation or an exact load gives it."""

from __future__ import annotations

from services.worker.evaluation.selection import Chosen, LayerView


class Full:
    """The exact baseline: no token is left out, and all of the KV is read."""

    def choose(self, view: LayerView) -> list[Chosen]:
        """Choose the whole prefix (None) for every question."""
        return [Chosen(None, 1.0) for _ in view.numbers]
