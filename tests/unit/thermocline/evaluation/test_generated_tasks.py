"""Tasks drawn from a seed."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ConfigError
from thermocline.evaluation.generated_tasks import GENERATED, generate
from thermocline.evaluation.task_file import Task, parse_task


class Words:
    """A tokenizer with a token for each word."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


def task_of(name: str, *, questions: int = 70, tokens: int = 200, seed: int = 1) -> Task:
    return generate(name, questions=questions, tokens=tokens, seed=seed, tokenizer=Words())


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_task_is_a_task(name: str) -> None:
    """It passes the checks of a file, and has as many questions as were asked for, or one less."""
    task = task_of(name)

    assert parse_task(msgspec.json.encode(task)) == task
    assert task.questions in (69, 70)


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_is_a_task(name: str) -> None:
    """The same seed gives the same digest, another seed another."""
    assert task_of(name).digest() == task_of(name).digest() != task_of(name, seed=2).digest()


@pytest.mark.parametrize("name", ["documents", "matching", "choosing", "groups"])
def test_answers_are_in_the_prefix(name: str) -> None:
    """Whoever reads the prefix can answer."""
    for group in task_of(name).groups:
        assert all(question.answer in str(group.shared_prefix) for question in group.questions)


@pytest.mark.parametrize("name", ["choosing", "examples", "groups", "kinds"])
def test_the_right_choice_may_stand_anywhere(name: str) -> None:
    """No place is right more than its share, give or take, so that always taking the first gains nothing."""
    task = task_of(name, questions=400)
    places = [one.choices.index(one.answer) for group in task.groups for one in group.questions]
    choices = max(places) + 1

    assert choices == (2 if name == "kinds" else 4)
    for place in range(choices):
        assert abs(places.count(place) / len(places) - 1 / choices) < 0.1


def test_short_documents_grow_until_they_have_choices() -> None:
    """A document of a few tokens states too few facts to choose among."""
    task = task_of("choosing", tokens=5, questions=4)

    assert all(len(question.choices) == 4 for group in task.groups for question in group.questions)


@pytest.mark.parametrize("arguments", [{"name": "poems"}, {"name": "documents", "questions": 0}])
def test_what_cannot_be_made_is_refused(arguments: dict[str, object]) -> None:
    """An unknown task, or one without questions."""
    with pytest.raises(ConfigError):
        task_of(**arguments)  # type: ignore[arg-type]
