"""Task files: what is read, and how faults are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from thermocline.evaluation.task_file import (
    MAX_FAULTS,
    Example,
    Group,
    Question,
    Task,
    load_task,
    parse_task,
    save_task,
)

CHOICE = {"question": "Q", "choices": ["a", "b"], "answer": "b"}
FREE = {"question": "Q", "answer": "a"}


DOCUMENTED = Path(__file__).parents[4] / "docs" / "reference" / "task-format.md"


def task_of(**changes: Any) -> bytes:
    fields = {"name": "t", "kind": "multiple_choice", "shared_prefix": "P", "questions": [CHOICE]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def faults_of(raw: bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_task(raw)
    return caught.value.message.splitlines()


def test_a_file_of_one_prefix_is_a_task_of_one_group() -> None:
    """Prefix and questions may stand in the file itself."""
    task = parse_task(task_of())

    assert task == Task(
        name="t",
        kind="multiple_choice",
        groups=(Group(shared_prefix="P", questions=(Question(question="Q", answer="b", choices=("a", "b")),)),),
    )


def test_a_prefix_may_be_documents_and_examples() -> None:
    """A list mixes both."""
    task = parse_task(task_of(shared_prefix=["D", {"question": "q", "answer": "a"}]))

    assert task.groups[0].shared_prefix == ("D", Example(question="q", answer="a"))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Saving and loading gives an equal task with an equal digest."""
    task = parse_task(task_of(kind="exact_match", questions=[FREE], layout="text", ends_with="\n"))

    save_task(task, tmp_path / "new" / "task.json")
    again = load_task(tmp_path / "new" / "task.json")

    assert again == task
    assert again.digest() == task.digest() != parse_task(task_of()).digest()


def test_every_fault_is_told_with_its_place() -> None:
    """Wrong types, missing and unknown fields in several places come in one message."""
    questions = [{"question": 1, "answer": "a"}, CHOICE, {"answer": "a"}, {**CHOICE, "hint": ""}]

    faults = faults_of(
        task_of(
            shared_prefix=None,
            questions=None,
            groups=[{"questions": []}, {"shared_prefix": "P", "questions": questions}],
        )
    )

    assert faults == [
        "$.groups[0]: object missing required field `shared_prefix`",
        "$.groups[1].questions[0].question: expected `str`, got `int`",
        "$.groups[1].questions[2]: object missing required field `question`",
        "$.groups[1].questions[3]: object contains unknown field `hint`",
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"name": ""}, "$.name: is empty"),
        ({"kind": "essay"}, "$.kind: invalid enum value 'essay'"),
        ({"shared_prefix": ""}, "$.shared_prefix: is empty"),
        ({"shared_prefix": None}, "$: object missing required field `shared_prefix`"),
        ({"questions": []}, "$.questions: is empty"),
        ({"questions": [{**CHOICE, "question": ""}]}, "$.questions[0].question: is empty"),
        ({"questions": [CHOICE, {**CHOICE, "answer": "c"}]}, "$.questions[1].answer: 'c' is not among the choices"),
        ({"questions": [{**CHOICE, "choices": ["b"]}]}, "$.questions[0].choices: multiple_choice needs two at least"),
        ({"questions": [{**CHOICE, "choices": ["b", "b"]}]}, "$.questions[0].choices: two are the same"),
        ({"questions": [{**CHOICE, "choices": ["b", ""]}]}, "$.questions[0].choices: one is empty"),
        ({"kind": "exact_match"}, "$.questions[0].choices: exact_match has none"),
        ({"kind": "exact_match", "questions": [{**FREE, "answer": ""}]}, "$.questions[0].answer: is empty"),
        (
            {"ends_with": "\n"},
            "$.ends_with: is for the layout text; the chat template says how an answer ends",
        ),
        ({"groups": []}, "$: has groups, so shared_prefix and questions belong inside them"),
        ({"shared_prefix": None, "questions": None, "groups": []}, "$.groups: is empty"),
    ],
)
def test_what_types_cannot_say_is_checked(changes: dict[str, Any], fault: str) -> None:
    """Each of these is the only fault."""
    assert faults_of(task_of(**changes)) == [fault]


def test_a_long_list_of_faults_is_cut() -> None:
    """What is left out is counted."""
    faults = faults_of(task_of(questions=[{"question": "Q"}] * (MAX_FAULTS + 5)))

    assert (len(faults), faults[-1]) == (MAX_FAULTS + 1, "and 5 more")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "task.json"
    path.write_bytes(b"{")

    with pytest.raises(ConfigError, match=r"task\.json is no task"):
        load_task(path)
    with pytest.raises(ConfigError, match="cannot read the task"):
        load_task(tmp_path / "none.json")


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1]), (3, [3]), (4, [3]), (5, [3, 2]), (6, [3, 3]), (99, [3, 3])])
def test_a_limit_leaves_no_question_alone(limit: int, sizes: list[int]) -> None:
    """The first questions stay, but a single one about a prefix is left out unless it is the only one."""
    group = {"shared_prefix": "P", "questions": [CHOICE] * 3}
    task = parse_task(task_of(shared_prefix=None, questions=None, groups=[group, group]))

    assert [len(one.questions) for one in task.limited(limit).groups] == sizes


def test_the_documented_tasks_are_tasks() -> None:
    """What the reference shows can be copied."""
    shown = DOCUMENTED.read_text(encoding="utf-8").split("```json\n")[1:]

    tasks = [parse_task(block.partition("```")[0].encode()) for block in shown]

    assert [task.name for task in tasks] == ["staff", "capitals"]
