"""The figures of an evaluation, and their standard errors. Pure.

A drop is measured in pairs: the same question with the whole prefix and with a part of it. So only questions whose
outcome changed add to its error, and a small drop shows in fewer questions than two separate accuracies would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question: whether it was right, the right answer's log-probability in nats, and the share of KV read."""

    right: bool
    log_probability: float
    read: float
    fallbacks: float


class MethodFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one ratio. Points are percentage points.

    ``lost`` and ``gained`` are questions that only the whole prefix, or only the part, had right. ``read`` is the part
    of the prefix's KV that was read, ``fallbacks`` that of the layers that consulted every head; ``nats_lost`` is how
    much the right answers' log-probability fell on average.
    """

    method: str
    ratio: float
    accuracy: float
    drop_points: float
    standard_error_points: float
    lost: int
    gained: int
    nats_lost: float
    read: float
    fallbacks: float
    seconds: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation. ``accuracy`` and its error are with the whole prefix, ``chance`` is the accuracy of guessing.

    ``deviation_nats`` is the largest difference between a log-probability scored here and one recomputed from the first
    token, over the first questions.
    """

    task: str
    task_digest: str
    model: str
    model_fingerprint: str
    dtype: str
    seed: int
    questions: int
    prefixes: int
    prefix_tokens: int
    chance: float
    accuracy: float
    standard_error_points: float
    deviation_nats: float
    probe_heads: int
    alpha: float
    first_tokens: int
    recent_tokens: int
    seconds: float
    methods: tuple[MethodFigure, ...]


def accuracy_of(outcomes: Sequence[Outcome]) -> float:
    """Return the share of right outcomes, 0 to 1. Raises ZeroDivisionError for none."""
    return sum(one.right for one in outcomes) / len(outcomes)


def accuracy_error_points(accuracy: float, questions: int) -> float:
    """Return the standard error of an accuracy by itself, in percentage points."""
    return float(100 * (accuracy * (1 - accuracy) / questions) ** 0.5)


def drop_error_points(lost: int, gained: int, questions: int) -> float:
    """Return the standard error of a drop in pairs, in percentage points.

    One more question is counted as changed than was seen: otherwise a short run without changes would have no error.
    """
    return float(100 * (lost + gained + 1) ** 0.5 / questions)


def compare(
    method: str, ratio: float, whole: Sequence[Outcome], part: Sequence[Outcome], seconds: float
) -> MethodFigure:
    """Return the figures of a method: ``whole`` and ``part`` have the same questions in the same order."""
    pairs = list(zip(whole, part, strict=True))
    lost = sum(one.right and not other.right for one, other in pairs)
    gained = sum(other.right and not one.right for one, other in pairs)
    return MethodFigure(
        method=method,
        ratio=ratio,
        accuracy=accuracy_of(part),
        drop_points=100 * (lost - gained) / len(pairs),
        standard_error_points=drop_error_points(lost, gained, len(pairs)),
        lost=lost,
        gained=gained,
        nats_lost=sum(one.log_probability - other.log_probability for one, other in pairs) / len(pairs),
        read=sum(one.read for one in part) / len(part),
        fallbacks=sum(one.fallbacks for one in part) / len(part),
        seconds=seconds,
    )
