"""Prefixes that one rank attends to in part: its heads of the tokens that rank 0 has chosen for the group.

Before rank 0 chooses, the ranks join their queries and their keys of the request's other tokens, which only the step of
the first chunk needs. What was chosen is remembered until the request has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.identification import Rows
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.kept_kv import KeptInPages, KeptKv
from services.worker.parallel.choices import Choose, LayerAsked
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share
from services.worker.parallel.orders import PrefixInPart, RunStep, TokensChosen, unpacked
from shared.messages.base import unpack_int32


class JoinedHeads:
    """Joins of the heads of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self, collectives: Collectives, share: Share, kv_heads: int) -> None:
        """``kv_heads`` are those of the whole model."""
        self._collectives, self._ranks = collectives, share.ranks
        self._kv_heads = kv_heads
        self.own = share.kv_heads(kv_heads)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries ``[heads, T, head_dim]`` of the model from each rank's share. Raises TransportError."""
        return self._joined(query)

    def keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Return keys ``[kv_heads, n, head_dim]`` of the model from each rank's share. Raises TransportError."""
        # With more ranks than KV heads, neighbours have the same head.
        return self._joined(keys)[:: max(1, self._ranks // self._kv_heads)]

    def of_rank(self, sets: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``sets``, which has one for each KV head of the model or one for all."""
        return sets if len(sets) == 1 else sets[self.own.start : self.own.stop]

    def _joined(self, heads: torch.Tensor) -> torch.Tensor:
        count, rows, width = heads.shape
        every = heads.new_empty(self._ranks * count * rows, width)
        self._collectives.gather(heads.reshape(count * rows, width), every)
        return every.view(self._ranks * count, rows, width)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What was chosen of one prefix: ``kept`` in the rank's part of the pool, ``positions`` by layer."""

    kept: KeptInPages
    positions: dict[int, torch.Tensor] = field(default_factory=dict)


class _StepChoices:
    """The choosing of one step, which ends in all ranks when a choice is void."""

    def __init__(self, heads: JoinedHeads, choose: Choose) -> None:
        self._heads, self._choose = heads, choose
        self._is_void = False

    def choose(self, number: int, asked: LayerAsked) -> TokensChosen | None:
        """Return the choice for the prefix ``number``, given this rank's heads of ``asked``; None for no more."""
        if self._is_void:
            return None
        rows = replace(asked.rows, query=self._heads.queries(asked.rows.query))
        chosen = self._choose(number, replace(asked, rows=rows, keys=self._heads.keys(asked.keys)))
        self._is_void = chosen.is_void
        return None if chosen.is_void else chosen


class RankPrefix:
    """One prefix in one step: a :class:`~services.worker.importance.importance_step.StepPrefix` of a rank's heads."""

    def __init__(self, order: PrefixInPart, opened: _Opened, heads: JoinedHeads, choices: _StepChoices) -> None:
        """Attend over what ``opened`` holds, which ``choices`` fill layer by layer."""
        self.start, self.end = order.start, order.end
        self.name = f"prefix {order.number} of a group"
        self.kept: KeptKv = opened.kept
        self.positions = opened.positions
        self._number, self._opened, self._heads, self._choices = order.number, opened, heads, choices

    def choose(self, layer: int, rows: Rows, keys: torch.Tensor, at: torch.Tensor) -> None:
        """Join what the layer chooses by, and remember what rank 0 chooses.

        All ranks call it at once. Raises errors that end the group.
        """
        chosen = self._choices.choose(self._number, LayerAsked(layer, rows, keys, at))
        if chosen is not None:
            tokens = unpacked(chosen.tokens).view(chosen.sets, -1)
            self._opened.kept.hold(layer, tokens.shape[1])
            self.positions[layer] = self._heads.of_rank(tokens).to(at.device)


class RankPrefixes:
    """The prefixes of one rank, from the step that opens each to the one that tells of its end."""

    def __init__(self, runner: ModelRunner, heads: JoinedHeads) -> None:
        """``runner`` computes the rank's share, over its part of the pool."""
        self._runner, self._heads = runner, heads
        self._opened: dict[int, _Opened] = {}

    def forward(
        self,
        order: RunStep,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        last_rows: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """Compute the step of ``order``, see ``ModelRunner.forward``; ``choose`` is how this rank gets its choices.

        All ranks call it at once. Raises errors that end the group.
        """
        for number in unpack_int32(order.ended):
            self._opened.pop(number, None)
        if not order.in_part:
            return self._runner.forward(ids, positions, meta, last_rows)
        choices = _StepChoices(self._heads, choose)
        prefixes = {
            each.segment: RankPrefix(each, self._opened_by(each), self._heads, choices) for each in order.in_part
        }
        step = ImportanceStep(meta, self._runner.pool, self._runner.attention, prefixes)
        return self._runner.run(ids, positions, step, last_rows)

    def _opened_by(self, order: PrefixInPart) -> _Opened:
        if order.number not in self._opened:
            pages = np.frombuffer(order.pages, dtype="<i4")
            self._opened[order.number] = _Opened(KeptInPages(self._runner.pool, pages))
        return self._opened[order.number]
