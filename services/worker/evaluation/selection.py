"""The interface of methods of selection: which tokens of the prefix a layer attends to.

Every method keeps as many tokens of a prefix in every layer and KV head as its budget says, so that methods are
compared at equal retention. How much each has to read to choose them is another matter, and is reported with the
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from services.worker.importance.identification import ProbeUnit, are_apart, head_units, heads_read
from services.worker.importance.metrics import Metric


class LayerView:
    """One layer of a pass over Q questions, as a method of selection sees it.

    ``numbers`` are the questions' places among all about this prefix, whatever the batch. The layer sees tokens
    ``[start, end)`` of the prefix: all of it, or the part within its sliding window. Attention weights are computed
    when they are first accessed, because most methods need none.
    """

    def __init__(
        self,
        layer: int,
        span: tuple[int, int],
        heads: tuple[int, int],
        numbers: tuple[int, ...],
        weigh: Callable[[bool], list[torch.Tensor]],
    ) -> None:
        """``heads`` are the numbers of query and KV heads; ``weigh`` gives weights, by rounded keys or not."""
        self.layer = layer
        self.start, self.end = span
        self.query_heads, self.kv_heads = heads
        self.numbers = numbers
        self._weigh = weigh

    @property
    def tokens(self) -> int:
        """Tokens of the prefix that the layer sees."""
        return self.end - self.start

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        """Attention weights of each question's own tokens to the tokens of the prefix that the layer sees.

        Float32 ``[query_heads, rows, tokens]`` for each question. The softmax runs over the prefix and the question.
        """
        return self._weigh(False)

    @cached_property
    def rounded_weights(self) -> list[torch.Tensor]:
        """The same by keys of the prefix as storages keep those of probe heads (:mod:`importance.key_codes`)."""
        return self._weigh(True)

    def importance(self, place: int, metric: Metric, probes: tuple[ProbeUnit, ...] | None = None) -> torch.Tensor:
        """Return the importance of tokens to question ``numbers[place]``, float32 ``[units, tokens]``.

        Units are ``probes``, by the keys that a worker reads for them, or else all KV heads with their groups.
        """
        wanted = head_units(self.query_heads, self.kv_heads) if probes is None else probes
        is_rounded = probes is not None and are_apart(heads_read(probes))
        weights = (self.rounded_weights if is_rounded else self.weights)[place]
        by_unit = torch.stack([weights[unit.first_query : unit.end_query] for unit in wanted])
        return metric.finish(metric.fold(weights.new_zeros(len(wanted), self.tokens), by_unit))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens that one question attends to in one layer.

    ``tokens`` int64 ``[kv_heads or 1, k]`` are places in the prefix, ascending in each row, with the same k for all
    questions of a batch; None is all of the prefix. ``read`` is the part of the layer's visible KV of the prefix that
    was read to choose and to attend, counted as IMPRESS does (section 4.3). ``fell_back``: the method had to consult
    every head after all.
    """

    tokens: torch.Tensor | None
    read: float
    fell_back: bool = False


class Selection(Protocol):
    """One method with one budget."""

    def choose(self, view: LayerView) -> list[Chosen]:
        """Return the choice for each question of the view in this layer. Deterministic; may remember earlier views."""
