"""The interface between an evaluation and a model: how likely answers are, given a prefix attended to in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.evaluation.packed_questions import Asked
from services.worker.evaluation.selection import Selection


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """Score of one answer. ``log_probability`` (nats) is the sum over its tokens, each given all tokens before it.

    ``is_greedy``: greedy decoding would write exactly this answer.
    """

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """Scores of a question's answers, in their order, and the cost of choosing tokens, averaged over the layers.

    ``read`` is the part of the prefix's KV that was read, and ``fallbacks`` the part of the layers where the method had
    to consult all heads.
    """

    answers: tuple[AnswerScore, ...]
    read: float
    fallbacks: float


class Scorer(Protocol):
    """A model that scores answers to questions behind a prefix."""

    def score(self, prefix: Sequence[int], asked: Sequence[Asked], selection: Selection) -> list[QuestionScore]:
        """Score every question behind the same prefix, each as if it stood alone.

        Raises ContextTooLong when prefix, question and answer do not fit the model's context, ConfigError when its
        memory is too small for the prefix.
        """
