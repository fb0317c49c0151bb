"""Tasks of any size that the bundled models can do, drawn from a seed. Their names are not in the training data.

Some patterns are beyond such small models: copying from bare ``name: value`` lines, without sentences and questions as
in training, stays at chance, so it is left out. ``docs/how-to/evaluate.md`` has the accuracy of each task with the
whole prefix.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError
from thermocline.documents import grammar
from thermocline.documents.grammar import (
    Fact,
    Split,
    Tokenizer,
    distinct_facts,
    fact_sentence,
    make_document,
    make_entity,
    make_name,
    question_about,
)
from thermocline.documents.words import MACHINES, PLACES, WORDS
from thermocline.evaluation.task_file import Example, Group, Question, Task

CHOICES = 4
EXAMPLES = 24
MEMBERS = 50
NEW_ITEMS = 40


@dataclass(frozen=True, slots=True)
class _Maker:
    """A kind of task. ``make(rng, tokens, tokenizer)`` draws one group, with a document of about ``tokens`` tokens."""

    kind: Literal["multiple_choice", "exact_match"]
    make: Callable[[random.Random, int, Tokenizer], Group]


def generate(name: str, *, questions: int, tokens: int, seed: int, tokenizer: Tokenizer) -> Task:
    """Return the task ``name`` with ``questions`` questions, or one less; documents are of about ``tokens`` tokens.

    The same arguments and vocabulary give the same task anywhere. Raises ConfigError for an unknown name or a number
    below one.
    """
    if name not in GENERATED:
        raise ConfigError(f"there is no task {name!r}; there are {', '.join(GENERATED)}, and files")
    if questions < 1 or tokens < 1:
        raise ConfigError("a task needs a question and documents of a token at least")
    rng = random.Random(f"{name} {seed}")
    maker = GENERATED[name]
    groups: list[Group] = []
    made = 0
    while made < questions:
        groups.append(maker.make(rng, tokens, tokenizer))
        made += len(groups[-1].questions)
    return Task(name=name, kind=maker.kind, groups=tuple(groups)).limited(questions)


def _document(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return facts between filler, each about an entity of its own; the answer is written out."""
    return _asked_freely(*make_document(rng, tokens, tokenizer))


def _matching(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return a document in which entities and attributes recur, so that only both together identify a fact."""
    return _asked_freely(*make_document(rng, tokens, tokenizer, shared=True))


def _asked_freely(document: str, asked: Sequence[grammar.Question]) -> Group:
    found = [Question(question=one.text, answer=one.answer) for one in asked]
    return Group(shared_prefix=document, questions=tuple(found))


def _choosing(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return a document whose questions offer the right value among values of its other facts."""
    while True:
        document, asked = make_document(rng, tokens, tokenizer)
        values = list(dict.fromkeys(one.answer for one in asked))
        if len(values) >= CHOICES:  # A document of few tokens may state too few facts.
            questions = [_choice(rng, one.text, one.answer, values) for one in asked]
            return Group(shared_prefix=document, questions=tuple(questions))
        tokens *= 2


def _examples(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return examples of questions with answers, and questions that ask the same in other words."""
    facts = distinct_facts(rng, EXAMPLES, Split.HELDOUT)
    shown = tuple(Example(question=question_about(rng, fact).text, answer=fact.value) for fact in facts)
    values = list(dict.fromkeys(fact.value for fact in facts))
    questions = [_choice(rng, question_about(rng, fact).text, fact.value, values) for fact in facts]
    return Group(shared_prefix=shown, questions=tuple(questions))


def _groups(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return members of four groups, and questions on the group of each: only the name identifies it."""
    labels = rng.sample(WORDS, CHOICES)
    members = [make_entity(rng, make_name(rng, Split.HELDOUT)) for _ in range(MEMBERS)]
    facts = [Fact(member, "group", rng.choice(labels)) for member in dict.fromkeys(members)]
    document = " ".join(fact_sentence(rng, fact) for fact in facts)
    questions = [_choice(rng, question_about(rng, fact).text, fact.value, labels) for fact in facts]
    return Group(shared_prefix=document, questions=tuple(questions))


def _kinds(rng: random.Random, tokens: int, tokenizer: Tokenizer) -> Group:
    """Return few-shot classification: places and machines have a label each, and the questions are on new ones."""
    labels = rng.sample(WORDS, 2)

    def item() -> Fact:
        kind = rng.randrange(2)
        noun = rng.choice((PLACES, MACHINES)[kind])
        return Fact(f"the {make_name(rng, Split.HELDOUT)} {noun}", "group", labels[kind])

    document = " ".join(fact_sentence(rng, item()) for _ in range(NEW_ITEMS))
    asked = [item() for _ in range(NEW_ITEMS)]
    questions = [_choice(rng, question_about(rng, fact).text, fact.value, labels) for fact in asked]
    return Group(shared_prefix=document, questions=tuple(questions))


def _choice(rng: random.Random, text: str, answer: str, values: Sequence[str]) -> Question:
    """Return a question with the right answer among :data:`CHOICES` values at most, in a random order."""
    others = [value for value in values if value != answer]
    choices = [answer, *rng.sample(others, min(CHOICES - 1, len(others)))]
    rng.shuffle(choices)
    return Question(question=text, answer=answer, choices=tuple(choices))


GENERATED = {
    "documents": _Maker("exact_match", _document),
    "matching": _Maker("exact_match", _matching),
    "choosing": _Maker("multiple_choice", _choosing),
    "examples": _Maker("multiple_choice", _examples),
    "groups": _Maker("multiple_choice", _groups),
    "kinds": _Maker("multiple_choice", _kinds),
}
"""Makers of tasks by name."""
