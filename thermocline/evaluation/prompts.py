"""From a task's texts to tokens: the shared prefix by itself, then every question and answer as additions to it.

A prefix is tokenised once for all its questions, so that its KV can be shared. So texts are cut at its end and at the
end of the question, and tokenised apart; in the chat layout special tokens lie there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.tokenizer import Tokenizer
from services.worker.evaluation.packed_questions import Asked
from shared.errors import ConfigError, InvalidRequest
from shared.model_files import load_generation_config
from thermocline.evaluation.task_file import Example, Group, Question, SharedPrefix, Task

BETWEEN_DOCUMENTS = "\n\n"


@dataclass(frozen=True, slots=True)
class Prompts:
    """One group as token ids. ``right[i]`` is the index of the right answer among those of ``asked[i]``."""

    prefix: tuple[int, ...]
    asked: tuple[Asked, ...]
    right: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its longest answer."""
        return len(self.prefix) + max(one.length for one in self.asked)


class PromptMaker:
    """The maker of one model's prompts."""

    def __init__(self, model_dir: Path) -> None:
        """Load the tokenizer. Raises OperatorError when that fails."""
        self._tokenizer = Tokenizer(model_dir)
        ends = load_generation_config(model_dir).get("eos_token_id")
        self._ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    def close(self) -> None:
        """Stop the tokenizer's threads."""
        self._tokenizer.close()

    def prompts(self, task: Task) -> list[Prompts]:
        """Return the prompts of every group. Raises ConfigError where the model's template forbids the layout."""
        return [self._of_group(task, group) for group in task.groups]

    def _of_group(self, task: Task, group: Group) -> Prompts:
        answers = [question.choices or (question.answer,) for question in group.questions]
        right = [found.index(question.answer) for found, question in zip(answers, group.questions, strict=True)]
        make = self._chat if task.layout == "chat" else self._text
        prefix, asked = make(task, group.shared_prefix, list(zip(group.questions, answers, strict=True)))
        return Prompts(tuple(prefix), tuple(asked), tuple(right))

    def _text(
        self, task: Task, prefix: SharedPrefix, questions: list[tuple[Question, tuple[str, ...]]]
    ) -> tuple[list[int], list[Asked]]:
        parts = (prefix,) if isinstance(prefix, str) else prefix
        texts = [part if isinstance(part, str) else part.question + part.answer + task.ends_with for part in parts]
        documents = [text for text, part in zip(texts, parts, strict=True) if isinstance(part, str)]
        between = BETWEEN_DOCUMENTS if len(documents) == len(parts) else ""
        ids = self._tokenizer.encode_now(between.join(texts), add_special_tokens=True)
        asked = [
            Asked(self._encode(question.question), tuple(self._encode(answer + task.ends_with) for answer in answers))
            for question, answers in questions
        ]
        return ids, asked

    def _chat(
        self, task: Task, prefix: SharedPrefix, questions: list[tuple[Question, tuple[str, ...]]]
    ) -> tuple[list[int], list[Asked]]:
        messages = _messages(prefix)
        opening = self._render(messages, asks=False)
        asked = []
        for question, answers in questions:
            user = [*messages, {"role": "user", "content": question.question}]
            prompt = self._render(user, asks=True)
            whole = [self._render([*user, {"role": "assistant", "content": answer}], asks=False) for answer in answers]
            replies = tuple(self._reply(_added(prompt, one)) for one in whole)
            asked.append(Asked(self._encode(_added(opening, prompt)), replies))
        return list(self._encode(opening)), asked

    def _render(self, messages: Sequence[dict[str, Any]], *, asks: bool) -> str:
        try:
            return self._tokenizer.render(messages, add_generation_prompt=asks)
        except InvalidRequest as error:
            raise ConfigError(f'{error.message}; give the task "layout": "text"') from error

    def _reply(self, text: str) -> tuple[int, ...]:
        """Return an answer's tokens up to its end token: a template may add more behind it, which no model writes."""
        ids = self._encode(text)
        ends = [place for place, token in enumerate(ids) if token in self._ends]
        return ids[: ends[0] + 1] if ends else ids

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_now(text, add_special_tokens=False))


def _messages(prefix: SharedPrefix) -> list[dict[str, Any]]:
    """Return a prefix as chat messages: documents are the system's message, examples are turns."""
    parts = (prefix,) if isinstance(prefix, str) else prefix
    documents = [part for part in parts if isinstance(part, str)]
    messages: list[dict[str, Any]] = []
    if documents:
        messages.append({"role": "system", "content": BETWEEN_DOCUMENTS.join(documents)})
    for part in parts:
        if isinstance(part, Example):
            messages.append({"role": "user", "content": part.question})
            messages.append({"role": "assistant", "content": part.answer})
    return messages


def _added(before: str, after: str) -> str:
    """Return what ``after`` adds to ``before``. Raises ConfigError where a template rewrites ``before``."""
    if not after.startswith(before) or len(after) == len(before):
        raise ConfigError('the chat template rewrites earlier messages; give the task "layout": "text"')
    return after[len(before) :]
