"""A scorer on a real model: the prefix's KV is computed once into the device pool, and questions select from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.model_runner import ModelRunner
from services.worker.evaluation.kept_attention import KeptAttention, PooledPrefix
from services.worker.evaluation.packed_questions import Asked, PackedQuestions, pack
from services.worker.evaluation.scorer import AnswerScore, QuestionScore
from services.worker.evaluation.selection import Chosen, Selection
from shared.errors import ConfigError, ContextTooLong

PREFIX_CHUNK = 1024
"""Tokens of the prefix in one forward pass."""

BATCH_WEIGHTS = 24_000_000
"""Most attention weights of one layer and batch: with intermediate results a few hundred megabytes of float32."""

BATCH_LOGITS = 64_000_000
"""Most logits of one batch, 256 MB of float32."""


class RunnerScorer:
    """A scorer that uses the runner's whole pool, alone. Remembers the last prefix. Not thread-safe."""

    def __init__(self, runner: ModelRunner) -> None:
        """Prepare. Raises ConfigError for a model whose pages cannot be read in parts."""
        if not runner.pool.planes.is_identity:
            raise ConfigError(
                f"importance is of K and V of all layers alike, and pages hold {runner.pool.planes.contents}"
            )
        self._runner = runner
        self._prefix: tuple[int, ...] = ()

    def score(self, prefix: Sequence[int], asked: Sequence[Asked], selection: Selection) -> list[QuestionScore]:
        """Score the questions in batches behind the prefix, whose KV is computed first unless it is the last one's.

        See :class:`~services.worker.evaluation.scorer.Scorer`.
        """
        check_context(self._runner, prefix, asked)
        pooled = self._compute(tuple(prefix))
        scores: list[QuestionScore] = []
        for batch in self._batches(asked, pooled.tokens):
            numbers = range(len(scores), len(scores) + len(batch))
            scores += self._score_batch(pooled, batch, numbers, selection)
        return scores

    def _compute(self, prefix: tuple[int, ...]) -> PooledPrefix:
        """Compute the prefix into the first pages of the pool, unless it is there; return it."""
        page_size, pool = self._runner.geometry.page_size, self._runner.pool
        pages = np.arange(pages_for(len(prefix), page_size))
        if len(pages) > pool.pages:
            raise ConfigError(f"a pool of {pool.pages} pages of {page_size} does not hold {len(prefix)} tokens")
        if prefix != self._prefix:
            self._prefix = ()  # Even if the code below raises, the pool no longer holds the old prefix.
            ids = torch.tensor(prefix)
            for start in range(0, len(prefix), PREFIX_CHUNK):
                end = min(start + PREFIX_CHUNK, len(prefix))
                segment = Segment(end - start, start, pages.astype(np.int32))
                meta = ForwardMeta.build([segment], page_size, pool.device)
                nothing = torch.empty(0, dtype=torch.int64)
                self._runner.forward(ids[start:end], torch.arange(start, end), meta, nothing)
            self._prefix = prefix
        return PooledPrefix(pool, pages, len(prefix))

    def _batches(self, asked: Sequence[Asked], prefix_tokens: int) -> Iterator[list[Asked]]:
        """Yield as many questions at a time as memory's bounds allow; at least one."""
        heads = self._runner.model.config.num_attention_heads
        batch: list[Asked] = []
        for one in asked:
            widest = max([one.rows, *(other.rows for other in batch)])
            weights = (len(batch) + 1) * widest * heads * (prefix_tokens + widest)
            logits = (len(batch) + 1) * widest * self._runner.vocab_size
            if batch and (weights > BATCH_WEIGHTS or logits > BATCH_LOGITS):
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    @torch.inference_mode()
    def _score_batch(
        self, prefix: PooledPrefix, asked: Sequence[Asked], numbers: Sequence[int], selection: Selection
    ) -> list[QuestionScore]:
        device = self._runner.pool.device
        packed = pack(asked, prefix.tokens, device)
        step = KeptAttention(prefix, packed, numbers, selection)
        logits = self._runner.run(packed.ids, packed.positions, step, packed.predicting)
        return question_scores(packed, logits, step.readings)


def check_context(runner: ModelRunner, prefix: Sequence[int], asked: Sequence[Asked]) -> None:
    """Raise ContextTooLong unless every question fits with its prefix, and ConfigError for an empty prefix."""
    if not prefix:
        raise ConfigError("a prefix needs a token at least")
    longest = len(prefix) + max((one.length for one in asked), default=0)
    if longest > runner.max_context:
        raise ContextTooLong(f"a prompt of {longest} tokens does not fit a context of {runner.max_context}")


def question_scores(
    packed: PackedQuestions, logits: torch.Tensor, readings: Sequence[Sequence[Chosen]]
) -> list[QuestionScore]:
    """Return the scores of a batch's questions from its logits, float32 [N, vocab].

    ``readings`` are those of its layers.
    """
    chosen = torch.log_softmax(logits, dim=-1).gather(1, packed.targets[:, None])[:, 0].double().cpu()
    greedy = (logits.argmax(dim=-1) == packed.targets).cpu()
    return [
        QuestionScore(
            answers=tuple(
                AnswerScore(float(chosen[start:end].sum()), bool(greedy[start:end].all())) for start, end in answers
            ),
            read=fmean(layer[number].read for layer in readings),
            fallbacks=fmean(layer[number].fell_back for layer in readings),
        )
        for number, answers in enumerate(packed.answers)
    ]
