"""Few-shot benchmarks with shuffled questions: every question follows the examples of its subject (HotPrefix 5.1).

The paper gives average prompt lengths (MMLU 567, Hellaswag 753, BBH 723, CEVAL 1673 tokens) and that questions are
shuffled. Numbers of questions and subjects are those of the public datasets. The share of examples in
a prompt, the spread of lengths, the skew of questions over subjects and the lengths of answers are assumptions, and
each is a setting. Hellaswag's examples are drawn for each activity category.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, Workload, name
from thermocline.simulate.workloads.lengths import around, scaled_to_mean, shares

Count = Annotated[int, Meta(ge=0)]


class FewShotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of few-shot benchmarks; 0 is the dataset's own value, but for ``spread``."""

    dataset: Literal["mmlu", "bbh", "ceval", "hellaswag"] = "mmlu"
    questions: Count = 0
    subjects: Count = 0
    prompt_tokens: Count = 0  # On average.
    answer_tokens: Count = 0  # On average.
    shared_part: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Share of a prompt that is its subject's examples.
    skew: Annotated[float, Meta(ge=0)] = 0.0  # Ratio of the largest subject's questions to the smallest's.
    spread: Annotated[float, Meta(ge=0)] = 0.35  # Standard deviation of the logarithm of lengths.


@dataclass(frozen=True, slots=True)
class _Dataset:
    questions: int
    subjects: int
    prompt_tokens: int
    answer_tokens: int
    shared_part: float
    skew: float


_DATASETS = {
    "mmlu": _Dataset(14_042, 57, 567, 1, 0.8, 15.0),
    "bbh": _Dataset(6_511, 27, 723, 100, 0.85, 1.7),
    "ceval": _Dataset(12_342, 52, 1_673, 150, 0.9, 4.0),
    "hellaswag": _Dataset(10_042, 192, 753, 1, 0.85, 30.0),
}


class FewShotWorkload(Workload):
    """Shuffled questions of one dataset, each behind its subject's examples."""

    def __init__(self, options: FewShotOptions, seed: int) -> None:
        """Draw the lengths of the subjects' examples by ``seed``, scaled to the wanted average over all questions."""
        known = _DATASETS[options.dataset]
        self._rng = Random(seed)
        self._spread = options.spread
        self._answer_tokens = options.answer_tokens or known.answer_tokens
        prompt_tokens = options.prompt_tokens or known.prompt_tokens
        shared_part = options.shared_part or known.shared_part
        subjects = options.subjects or known.subjects
        skew = options.skew or known.skew
        weights = [skew ** (-index / max(1, subjects - 1)) for index in range(subjects)]
        drawn = [around(self._rng, prompt_tokens, options.spread) for _ in range(subjects)]
        self._examples = scaled_to_mean(drawn, weights, prompt_tokens * shared_part)
        self._question_tokens = prompt_tokens * (1 - shared_part)
        self._counts = shares(options.questions or known.questions, weights)

    def requests(self) -> Iterator[Asked]:
        """Yield all questions in random order, without times."""
        order = [subject for subject, count in enumerate(self._counts) for _ in range(count)]
        self._rng.shuffle(order)
        for number, subject in enumerate(order):
            examples = Span(name(SHARED, subject), self._examples[subject])
            question = Span(name(QUESTION, number), around(self._rng, self._question_tokens, self._spread))
            drawn = around(self._rng, self._answer_tokens, self._spread)
            # An answer of one token is the letter of a choice: it has no spread.
            answer = Span(name(OUTPUT, number), drawn if self._answer_tokens > 1 else 1)
            yield Asked((examples, question), answer)
