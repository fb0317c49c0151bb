"""Task files: questions about shared prefixes, in JSON. ``docs/reference/task-format.md`` describes the format.

A file is checked as a whole: all faults are reported at once, each with its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shared.errors import ConfigError
from shared.undecodable import UNDECODABLE

MAX_FILE_BYTES = 256 * 1024**2
MAX_FAULTS = 20
"""Faults that an error lists; the rest are only counted."""

T = TypeVar("T")


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question with its answer in a shared prefix."""

    question: str
    answer: str


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A question and its right answer. ``choices``, for multiple choice only, hold that answer and others."""

    question: str
    answer: str
    choices: tuple[str, ...] = ()


SharedPrefix = str | tuple[str | Example, ...]
"""A text, or documents and examples in their order."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Questions about one prefix."""

    shared_prefix: SharedPrefix
    questions: tuple[Question, ...]


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task of an evaluation.

    Layout "chat" wraps all texts in the model's chat template; "text" concatenates them as they are, each answer
    followed by ``ends_with``.
    """

    name: str
    kind: Literal["multiple_choice", "exact_match"]
    layout: Literal["chat", "text"] = "chat"
    ends_with: str = ""
    groups: tuple[Group, ...]

    @property
    def questions(self) -> int:
        """Number of questions in all groups."""
        return sum(len(group.questions) for group in self.groups)

    def digest(self) -> str:
        """Return 32 hex digits over the whole task: equal for equal tasks, whatever the layout of their files."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def limited(self, questions: int) -> Task:
        """Return the task with its first ``questions`` questions at most, or one less.

        The cut leaves no single question of a larger group, since some methods learn from others, unless in the first.
        """
        groups: list[Group] = []
        left = questions
        for group in self.groups:
            if left <= 0 or (left == 1 and groups and len(group.questions) > 1):
                break
            groups.append(msgspec.structs.replace(group, questions=group.questions[:left]))
            left -= len(group.questions)
        return msgspec.structs.replace(self, groups=tuple(groups))


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The file's own fields; the entries of its lists are converted one by one."""

    name: str
    kind: Literal["multiple_choice", "exact_match"]
    layout: Literal["chat", "text"] = "chat"
    ends_with: str = ""
    groups: list[Any] | msgspec.UnsetType = msgspec.UNSET
    shared_prefix: Any = msgspec.UNSET
    questions: list[Any] | msgspec.UnsetType = msgspec.UNSET


class _Group(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    shared_prefix: SharedPrefix
    questions: list[Any]


def load_task(path: Path) -> Task:
    """Read a task file. Raises ConfigError, with its faults and their places, for an invalid one."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the task {path}: {error.strerror}") from error
    try:
        return parse_task(raw)
    except ConfigError as error:
        raise ConfigError(f"{path} is no task:\n{error.message}") from error


def parse_task(raw: bytes) -> Task:
    """Parse a task from JSON. Raises ConfigError with a line for each fault."""
    faults: list[str] = []
    try:
        document = msgspec.json.decode(raw)
    except UNDECODABLE as error:
        raise ConfigError(f"$: {error}") from error
    header = _converted(document, _Header, "$", faults)
    if header is None:
        raise ConfigError(_told(faults))
    groups = [_group(value, place, faults) for place, value in _raw_groups(header, document, faults)]
    task = Task(
        name=header.name,
        kind=header.kind,
        layout=header.layout,
        ends_with=header.ends_with,
        groups=tuple(group for group in groups if group is not None),
    )
    if not faults:  # The checks below name places by index, which a group that was left out would shift.
        single = header.groups is msgspec.UNSET
        faults += _faults_of(task, "$" if single else None)
    if faults:
        raise ConfigError(_told(faults))
    return task


def save_task(task: Task, path: Path) -> None:
    """Write a task as JSON for :func:`load_task`. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(task), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the task {path}: {error.strerror}") from error


def _raw_groups(header: _Header, document: Any, faults: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield every group with its place: those of ``groups``, or the file's own prefix and questions as the only one."""
    of_file = {name: document[name] for name in ("shared_prefix", "questions") if name in document}
    if header.groups is msgspec.UNSET:
        yield "$", of_file
        return
    if of_file:
        faults.append(f"$: has groups, so {' and '.join(of_file)} belong inside them")
    for number, value in enumerate(header.groups):
        yield f"$.groups[{number}]", value


def _group(value: Any, place: str, faults: list[str]) -> Group | None:
    group = _converted(value, _Group, place, faults)
    if group is None:
        return None
    questions = [
        _converted(question, Question, f"{place}.questions[{number}]", faults)
        for number, question in enumerate(group.questions)
    ]
    return Group(
        shared_prefix=group.shared_prefix,
        questions=tuple(question for question in questions if question is not None),
    )


def _converted(value: Any, kind: type[T], place: str, faults: list[str]) -> T | None:
    """Return ``value`` as ``kind``, or add a fault and return None."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, inner = str(error).partition(" - at `$")
        faults.append(f"{place}{inner.removesuffix('`')}: {text[:1].lower()}{text[1:]}")
        return None


def _faults_of(task: Task, only_place: str | None) -> Iterator[str]:
    """Yield the faults that types do not find."""
    if not task.name:
        yield "$.name: is empty"
    if task.layout == "chat" and task.ends_with:
        yield "$.ends_with: is for the layout text; the chat template says how an answer ends"
    if not task.groups:
        yield "$.groups: is empty"
    for number, group in enumerate(task.groups):
        place = only_place or f"$.groups[{number}]"
        if not group.shared_prefix:
            yield f"{place}.shared_prefix: is empty"
        if not group.questions:
            yield f"{place}.questions: is empty"
        for index, question in enumerate(group.questions):
            for fault in _question_faults(question, task.kind):
                yield f"{place}.questions[{index}]{fault}"


def _question_faults(question: Question, kind: str) -> Iterator[str]:
    if not question.question:
        yield ".question: is empty"
    if not question.answer:
        yield ".answer: is empty"
    if kind == "exact_match":
        if question.choices:
            yield ".choices: exact_match has none"
        return
    if len(question.choices) < 2:
        yield ".choices: multiple_choice needs two at least"
    if not all(question.choices):
        yield ".choices: one is empty"
    if len(dict.fromkeys(question.choices)) < len(question.choices):
        yield ".choices: two are the same"
    if question.choices and question.answer not in question.choices:
        yield f".answer: {question.answer!r} is not among the choices"


def _told(faults: list[str]) -> str:
    more = len(faults) - MAX_FAULTS
    return "\n".join([*faults[:MAX_FAULTS], *([f"and {more} more"] if more > 0 else [])])
