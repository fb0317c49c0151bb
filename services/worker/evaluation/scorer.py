"""What an evaluation asks of a model: how likely answers are, given a prefix that is attended to in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.evaluation.packed_questions import Asked
from services.worker.evaluation.selection import Selection


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """``log_probability`` (nats) is the sum over the answer's tokens, each given what is before it. ``is_greedy``:
    greedy decoding would write exactly this answer.
    """

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """Scores of a question's answers, in their order, and what choosing tokens took, averaged over the layers:

    ``read``, the part of the prefix's KV that was read, and ``fallbacks``, the part of the layers where the method had
    to consult all heads.
    """

    answers: tuple[AnswerScore, ...]
    read: float
    fallbacks: float


class Scorer(Protocol):
    def score(self, prefix: Sequence[int], asked: Sequence[Asked], selection: Selection) -> list[QuestionScore]:
        """Score every question behind the same prefix, each as if it stood alone.

        Raises ContextTooLong when prefix, question and answer do not fit the model's context, ConfigError when its
        memory is too small for the prefix.
        """
