"""The reference: every answer computed by itself from its first token, in service's own attention. Slow.

It shares only the model with :mod:`services.worker.evaluation.runner_scorer`. So if the two agree, neither packing, nor
the shared prefix, nor attention over kept tokens changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.model_runner import ModelRunner
from services.worker.evaluation.packed_questions import Asked
from services.worker.evaluation.runner_scorer import check_context
from services.worker.evaluation.scorer import AnswerScore, QuestionScore
from shared.errors import ConfigError


class RecomputingScorer:
    """A scorer without selection: all of the prefix is attended to. Overwrites the pool from its first page."""

    def __init__(self, runner: ModelRunner) -> None:
        """Compute with ``runner``, whose pool nothing else uses meanwhile; it is not closed here."""
        self._runner = runner

    def score(self, prefix: Sequence[int], asked: Sequence[Asked]) -> list[QuestionScore]:
        """Score every answer in a pass of its own; see :class:`~services.worker.evaluation.scorer.Scorer`."""
        check_context(self._runner, prefix, asked)
        return [
            QuestionScore(
                tuple(self._answer([*prefix, *one.question], answer) for answer in one.answers), read=1.0, fallbacks=0.0
            )
            for one in asked
        ]

    def _answer(self, prompt: list[int], answer: tuple[int, ...]) -> AnswerScore:
        ids = torch.tensor([*prompt, *answer])
        page_size, pool = self._runner.geometry.page_size, self._runner.pool
        pages = pages_for(len(ids), page_size)
        if pages > pool.pages:
            raise ConfigError(f"a pool of {pool.pages} pages of {page_size} does not hold {len(ids)} tokens")
        meta = ForwardMeta.build([Segment(len(ids), 0, np.arange(pages, dtype=np.int32))], page_size, pool.device)
        predicting = torch.arange(len(prompt) - 1, len(ids) - 1)
        logits = self._runner.forward(ids, torch.arange(len(ids)), meta, predicting).cpu()
        targets = ids[len(prompt) :]
        chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).double()
        return AnswerScore(float(chosen.sum()), bool((logits.argmax(dim=-1) == targets).all()))
