"""The comparison itself, over a scorer whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.worker.evaluation.methods import Full, Method, MethodSettings
from services.worker.evaluation.methods.static import Recorder, Static
from services.worker.evaluation.packed_questions import Asked
from services.worker.evaluation.scorer import AnswerScore, QuestionScore
from services.worker.evaluation.selection import Selection
from thermocline.evaluation.evaluation import Plan, evaluate, outcome
from thermocline.evaluation.prompts import Prompts


def question(*answers: float, greedy: int | None = None) -> QuestionScore:
    return QuestionScore(tuple(AnswerScore(one, place == greedy) for place, one in enumerate(answers)), 0.5, 0.25)


class KnownScorer:
    """Is right about everything with the whole prefix, and with a part of it about every second question."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Selection]] = []

    def score(self, prefix: Sequence[int], asked: Sequence[Asked], selection: Selection) -> list[QuestionScore]:
        self.asked.append((prefix[0], selection))
        whole = isinstance(selection, Full | Recorder)
        return [question(*((-1.0, -2.0) if whole or number % 2 else (-2.0, -1.0))) for number in range(len(asked))]


ASKED = Asked((1,), ((2,), (3,)))
GROUPS = [Prompts((7,), (ASKED,) * 4, (0,) * 4), Prompts((8,), (ASKED,) * 2, (0, 0))]


def test_every_group_is_asked_with_every_method_and_ratio() -> None:
    """All of one prefix comes before anything of the next, and a method that learns sees the questions first."""
    scorer, done = KnownScorer(), []
    methods = Method.named("static"), Method.named("recent")

    compared = evaluate(
        GROUPS, Plan(methods, (0.5, 0.1), MethodSettings(), True), scorer, on_group=lambda: done.append(1)
    )

    assert [prefix for prefix, _ in scorer.asked] == [7] * 6 + [8] * 6
    assert [type(selection) for _, selection in scorer.asked[:4]] == [Full, Recorder, Static, Static]
    assert len(done) == 2
    assert [(one.method, one.ratio) for one in compared.methods] == [
        ("static", 0.5),
        ("static", 0.1),
        ("recent", 0.5),
        ("recent", 0.1),
    ]
    assert [(one.lost, one.accuracy, one.drop_points) for one in compared.methods] == [(3, 0.5, 50.0)] * 4


def test_prefixes_have_random_tokens_of_their_own() -> None:
    """Equal seeds for different prefixes would draw the same places."""
    scorer = KnownScorer()

    evaluate(GROUPS, Plan((Method.named("random"),), (0.5,), MethodSettings(seed=1), True), scorer)

    first, second = (selection for _, selection in scorer.asked if not isinstance(selection, Full))
    assert vars(first)["_seed"] != vars(second)["_seed"]


@pytest.mark.parametrize(
    ("score", "right", "is_right"),
    [
        (question(-3.0, -1.0, -2.0), 1, True),
        (question(-3.0, -1.0, -2.0), 2, False),
        (question(-1.0, -1.0), 0, True),
        (question(-1.0, -1.0), 1, False),
    ],
)
def test_the_most_likely_choice_is_the_answer(score: QuestionScore, right: int, is_right: bool) -> None:
    """Of equally likely ones it is the first."""
    found = outcome(score, right, multiple_choice=True)

    assert (found.right, found.log_probability) == (is_right, score.answers[right].log_probability)


def test_a_free_answer_must_be_what_the_model_would_write() -> None:
    """However likely it is otherwise."""
    assert outcome(question(-0.1, greedy=0), 0, multiple_choice=False).right
    assert not outcome(question(-0.1), 0, multiple_choice=False).right
