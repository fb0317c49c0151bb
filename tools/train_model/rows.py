"""Training rows: a document and a conversation about it, as token ids, roles and positions.

Each row asks many questions of one document, so the loss is dense.  Some rows leave random gaps
between the positions of consecutive sentences, so that a short row exercises long distances.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from thermocline.documents import grammar, linked
from thermocline.documents.filler import filler_sentence
from tools.train_model.noise import noisy_sentence
from tools.train_model.tokenizer import PAD, PieceEncoder

Array = NDArray[np.int64]
GAP_STRIDE = 8
"""Gaps are multiples of this many positions."""


class Role(IntEnum):
    """What a token is to the loss."""

    CONTEXT = 0
    ANSWER = 1
    REPEATED = 2
    """Part of a repetition row that cannot be known from what came before."""


@dataclass(frozen=True, slots=True)
class RowMix:
    """How rows are drawn; every field but the last is the chance of a kind of row."""

    easy: float = 0.6
    repetition: float = 0.0
    gapped: float = 0.4
    linked: float = 0.0
    context_tokens: int = 2048
    """Positions reach up to here."""


@dataclass(slots=True)
class Row:
    """A row under construction; the three lists have one entry for each token."""

    encoder: PieceEncoder
    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    gap_allowed: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def text(self, text: str, role: Role = Role.CONTEXT, *, gap: bool = False) -> None:
        """Append text; ``gap`` allows a jump in position just before it."""
        ids = self.encoder.encode(text)
        self.ids += ids
        self.roles += [int(role)] * len(ids)
        self.gap_allowed += [gap] + [False] * (len(ids) - 1)

    def special(self, token: str, role: Role = Role.CONTEXT, *, gap: bool = False) -> None:
        """Append one special token."""
        self.ids.append(self.encoder.special[token])
        self.roles.append(int(role))
        self.gap_allowed.append(gap)


def _draw_facts(rng: random.Random, count: int, split: grammar.Split, easy: float) -> list[grammar.Fact]:
    draw = grammar.distinct_facts if rng.random() < easy else grammar.shared_facts
    return draw(rng, max(2, count), split)


def repetition_row(rng: random.Random, row: Row, length: int, split: grammar.Split, mix: RowMix) -> None:
    """Fill ``row`` with facts and then the same facts in new orders: an early, dense signal."""
    facts = _draw_facts(rng, int(length * rng.uniform(0.3, 0.5) / 17), split, mix.easy)
    sentences = [(grammar.fact_sentence(rng, fact), fact.value) for fact in facts]
    repeated = False
    while len(row) < length:
        rng.shuffle(sentences)
        for sentence, value in sentences:
            stem = sentence[: -len(value) - 2]
            row.text(" " + stem, Role.REPEATED, gap=True)
            row.text(f" {value}.", Role.ANSWER if repeated else Role.REPEATED)
        repeated = True


def conversation_row(rng: random.Random, row: Row, length: int, split: grammar.Split, mix: RowMix) -> None:
    """Fill ``row`` with a document, then questions about its facts and their answers."""
    document_tokens = int(length * rng.uniform(0.4, 0.65))
    filler_share = rng.uniform(0.05, 0.5)
    question_in_first_message = rng.random() < 0.3
    is_linked = mix.linked > 0 and rng.random() < mix.linked
    draw = linked.linked_facts if is_linked else partial(_draw_facts, easy=mix.easy)
    facts = draw(rng, document_tokens // 12, split)
    row.special("<|user|>" if question_in_first_message else "<|system|>")
    stated: list[grammar.Fact] = []
    separator = ""
    while len(row) < document_tokens and len(stated) < len(facts):
        if rng.random() < filler_share:
            is_training = split is grammar.Split.TRAINING
            sentence = noisy_sentence(rng) if is_training else filler_sentence(rng, grammar.FILLER[split])
        else:
            sentence = grammar.fact_sentence(rng, facts[len(stated)])
            stated.append(facts[len(stated)])
        row.text(separator + sentence, gap=True)
        separator = " "
    stated = stated or facts[:1]
    questions = _questions(rng, stated, is_linked)
    is_first = True
    while len(row) < length:
        question = next(questions)
        if is_first and question_in_first_message:
            row.text("\n\n" + question.text)
        else:
            if is_first:
                row.special("<|end|>")
            row.special("<|user|>", gap=True)
            row.text(question.text)
        row.special("<|end|>")
        row.special("<|assistant|>")
        row.text(question.answer, Role.ANSWER)
        row.special("<|end|>", Role.ANSWER)
        is_first = False


def _questions(rng: random.Random, stated: list[grammar.Fact], is_linked: bool) -> Iterator[grammar.Question]:
    """Yield questions about a document for ever, in random orders."""
    while True:
        if is_linked:
            yield from (asked.question for asked in linked.questions_about(rng, stated))
        else:
            yield from (grammar.question_about(rng, fact) for fact in reversed(rng.sample(stated, len(stated))))


def positions(rng: random.Random, gap_allowed: list[bool], context_tokens: int) -> Array:
    """Positions of a row's tokens, with random gaps where they are allowed; all < context."""
    steps = np.ones(len(gap_allowed), np.int64)
    places = np.flatnonzero(gap_allowed)
    spare = int((context_tokens - len(gap_allowed) - 2) * rng.random() ** 1.5)
    if len(places):
        for _ in range(spare // GAP_STRIDE + 1):
            steps[places[rng.randrange(len(places))]] += GAP_STRIDE
    result: Array = np.minimum(np.cumsum(steps) - steps[0], context_tokens - 1)
    return result


def make_row(
    rng: random.Random, encoder: PieceEncoder, length: int, mix: RowMix, split: grammar.Split
) -> tuple[list[int], list[int], Array]:
    """Draw one row: token ids, roles and positions, each of ``length`` entries."""
    row = Row(encoder)
    row.special("<s>")
    kind = repetition_row if rng.random() < mix.repetition else conversation_row
    kind(rng, row, length, split, mix)
    if mix.context_tokens > length and rng.random() < mix.gapped:
        where = positions(rng, row.gap_allowed[:length], mix.context_tokens)
    else:
        where = np.arange(length, dtype=np.int64)
    return row.ids[:length], row.roles[:length], where


def make_batch(
    rng: random.Random,
    encoder: PieceEncoder,
    rows: int,
    length: int,
    mix: RowMix,
    split: grammar.Split = grammar.Split.TRAINING,
) -> tuple[Array, Array, Array]:
    """Draw a batch: ids, roles and positions, each ``[rows, length + 1]`` (inputs and targets)."""
    ids = np.full((rows, length + 1), encoder.special[PAD], np.int64)
    roles = np.zeros((rows, length + 1), np.int64)
    where = np.zeros((rows, length + 1), np.int64)
    for index in range(rows):
        ids[index], roles[index], where[index] = make_row(rng, encoder, length + 1, mix, split)
    return ids, roles, where
