"""Score every question with the whole prefix, and again with the part that each method keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.worker.evaluation.methods import Full, Method, MethodSettings
from services.worker.evaluation.methods.static import Recorder
from services.worker.evaluation.scorer import QuestionScore, Scorer
from services.worker.evaluation.selection import Selection
from thermocline.evaluation.figures import MethodFigure, Outcome, compare
from thermocline.evaluation.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Plan:
    """The methods and ratios to compare. ``ratios`` are shares of the prefix's tokens."""

    methods: tuple[Method, ...]
    ratios: tuple[float, ...]
    settings: MethodSettings
    multiple_choice: bool


@dataclass(slots=True)
class _Run:
    """One method at one ratio, over the questions so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Outcomes with the whole prefix, and the figures of each method and ratio, in the order of the plan."""

    whole: tuple[Outcome, ...]
    methods: tuple[MethodFigure, ...]


def evaluate(
    groups: Sequence[Prompts], plan: Plan, scorer: Scorer, *, on_group: Callable[[], None] = lambda: None
) -> Compared:
    """Score all questions, group by group, so that each prefix is computed once. Raises what ``scorer`` raises.

    ``on_group`` is called after each group.
    """
    whole = _Run()
    runs = {(method.name, ratio): _Run() for method in plan.methods for ratio in plan.ratios}
    for number, group in enumerate(groups):
        _score(whole, group, Full(), scorer, plan)
        # Every prefix has its own random draws.
        settings = replace(plan.settings, seed=plan.settings.seed * 100_003 + number)
        for method in plan.methods:
            recorder = _recorded(method, group, scorer)
            for ratio in plan.ratios:
                _score(runs[method.name, ratio], group, method.at(ratio, settings, recorder), scorer, plan)
        on_group()
    figures = [
        compare(name, ratio, whole.outcomes, run.outcomes, round(run.seconds, 3)) for (name, ratio), run in runs.items()
    ]
    return Compared(tuple(whole.outcomes), tuple(figures))


def _recorded(method: Method, group: Prompts, scorer: Scorer) -> Recorder | None:
    if not method.needs_record:
        return None
    recorder = method.recorder()
    scorer.score(group.prefix, group.asked, recorder)
    return recorder


def _score(run: _Run, group: Prompts, selection: Selection, scorer: Scorer, plan: Plan) -> None:
    began = time.perf_counter()
    scores = scorer.score(group.prefix, group.asked, selection)
    run.seconds += time.perf_counter() - began
    run.outcomes += [
        outcome(score, right, multiple_choice=plan.multiple_choice)
        for score, right in zip(scores, group.right, strict=True)
    ]


def outcome(score: QuestionScore, right: int, *, multiple_choice: bool) -> Outcome:
    """Return the outcome of one question, whose right answer has the index ``right``.

    A choice is right if it is the first of the likeliest, whatever its length; a free answer if greedy decoding writes
    exactly it.
    """
    likelihoods = [answer.log_probability for answer in score.answers]
    is_right = likelihoods.index(max(likelihoods)) == right if multiple_choice else score.answers[right].is_greedy
    return Outcome(is_right, likelihoods[right], score.read, score.fallbacks)
