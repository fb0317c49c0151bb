"""Synthetic long documents that state facts, and questions about them.

A document is a run of sentences: facts ("The access code of the Braxol clinic is 4821.") in random
order with filler between them.  Every entity carries a made-up name.  A name belongs to exactly one
split, decided by a checksum of the name, so a held-out document has no name that training saw.

This module must not import torch: the demo and the benchmarks use it to make documents whose
questions have known answers.  Everything random comes from the ``random.Random`` passed in.

    >>> document, questions = make_document(random.Random(7), 512, tokenizer)
    >>> questions[0]
    Question(text='What is the budget of project Tabor?', answer='3107')
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from thermocline.documents.filler import SENTENCES, filler_sentence
from thermocline.documents.words import (
    CODAS,
    FIRST_NAMES,
    MACHINES,
    NUMBER_ATTRIBUTES,
    ONSETS,
    PLACES,
    VOWELS,
    WORD_ATTRIBUTES,
    WORDS,
)

FILLER_SHARE = 1 / 3
"""The share of a document's sentences that are filler, unless a caller asks for another."""

FACT_TEMPLATES = (
    "The {attribute} of {entity} is {value}.",
    "The {attribute} of {entity} is {value}.",
    "For {entity}, the {attribute} is {value}.",
    "{Entity} has the {attribute} {value}.",
)
QUESTION_TEMPLATES = (
    "What is the {attribute} of {entity}?",
    "What is the {attribute} of {entity}?",
    "Tell me the {attribute} of {entity}.",
    "For {entity}, what is the {attribute}?",
)


class Split(Enum):
    """The names and filler sentences that a document may use."""

    TRAINING = "training"
    HELDOUT = "heldout"


class Tokenizer(Protocol):
    """The part of a tokenizer that ``make_document`` needs."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text; only their number matters."""
        ...


@dataclass(frozen=True, slots=True)
class Fact:
    """One attribute of one entity."""

    entity: str
    attribute: str
    value: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question in plain words, and the exact text that answers it."""

    text: str
    answer: str


def split_of(text: str) -> Split:
    """Return the split of a name or filler sentence: one in eight is held out."""
    return Split.HELDOUT if zlib.crc32(text.encode()) % 8 == 0 else Split.TRAINING


FILLER = {split: tuple(s for s in SENTENCES if split_of(s) is split) for split in Split}


def make_name(rng: random.Random, split: Split) -> str:
    """Draw a made-up name of two or three syllables that belongs to ``split``."""
    while True:
        syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((2, 2, 3))))
        name = "".join(syllables).capitalize()
        if split_of(name) is split:
            return name


def make_entity(rng: random.Random, name: str) -> str:
    """Turn a name into an entity: a place, a machine, a project or a person."""
    kind = rng.random()
    if kind < 0.35:
        return f"the {name} {rng.choice(PLACES)}"
    if kind < 0.60:
        return f"the {name} {rng.choice(MACHINES)}"
    if kind < 0.80:
        return f"project {name}"
    return f"{rng.choice(FIRST_NAMES)} {name}"


def make_value(rng: random.Random, attribute: str, split: Split) -> str:
    """Draw a value fit for ``attribute``: two to five digits, or a word, or a name of ``split``."""
    if attribute in NUMBER_ATTRIBUTES:
        digits = rng.choice((2, 3, 4, 4, 4, 5))
        return str(rng.randrange(10 ** (digits - 1), 10**digits))
    return rng.choice(WORDS) if rng.random() < 0.6 else make_name(rng, split)


def make_attribute(rng: random.Random) -> str:
    """Draw an attribute; six in ten have numbers for values."""
    return rng.choice(NUMBER_ATTRIBUTES if rng.random() < 0.6 else WORD_ATTRIBUTES)


def distinct_facts(rng: random.Random, count: int, split: Split) -> list[Fact]:
    """Draw ``count`` facts about ``count`` entities whose names all differ."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[make_name(rng, split)] = None
    facts = []
    for name in names:
        attribute = make_attribute(rng)
        facts.append(Fact(make_entity(rng, name), attribute, make_value(rng, attribute, split)))
    return facts


def shared_facts(rng: random.Random, count: int, split: Split) -> list[Fact]:
    """Draw ``count`` facts in which entities and attributes recur: the hard set.

    The facts are a random part of a grid of about sqrt(count) entities by as many attributes as
    give twice the facts wanted, so a question is answered only by matching both.
    """
    entity_count = max(2, int(count**0.5 * rng.uniform(0.8, 1.6)) + 1)
    attribute_count = min(-(-2 * count // entity_count), 36)
    entity_count = max(entity_count, -(-count // attribute_count))
    names: dict[str, None] = {}
    while len(names) < entity_count:
        names[make_name(rng, split)] = None
    attributes: dict[str, None] = {}
    while len(attributes) < attribute_count:
        attributes[make_attribute(rng)] = None
    entities = [make_entity(rng, name) for name in names]
    grid = [(entity, attribute) for entity in entities for attribute in attributes]
    rng.shuffle(grid)
    return [Fact(e, a, make_value(rng, a, split)) for e, a in grid[:count]]


def fact_sentence(rng: random.Random, fact: Fact) -> str:
    """State a fact in one of the fact templates."""
    return rng.choice(FACT_TEMPLATES).format(
        attribute=fact.attribute,
        entity=fact.entity,
        Entity=fact.entity[0].upper() + fact.entity[1:],
        value=fact.value,
    )


def question_about(rng: random.Random, fact: Fact) -> Question:
    """Ask for a fact's value in one of the question templates."""
    text = rng.choice(QUESTION_TEMPLATES).format(attribute=fact.attribute, entity=fact.entity)
    return Question(text, fact.value)


def make_document(
    rng: random.Random,
    target_tokens: int,
    tokenizer: Tokenizer,
    *,
    split: Split = Split.HELDOUT,
    shared: bool = False,
) -> tuple[str, list[Question]]:
    """Make a document of about ``target_tokens`` tokens and one question for each of its facts.

    The document is the longest run of whole sentences that does not exceed ``target_tokens`` of
    ``tokenizer`` (at least one fact, however long), so it falls short by less than a sentence,
    about 15 tokens.  The questions come in a random order, not in the document's.

    ``shared=False`` (the easy set) gives every fact an entity of its own; ``shared=True`` (the hard
    set) lets entities and attributes recur.  The same ``rng`` state and arguments give the same
    document on any machine.
    """
    enough_facts = max(2, target_tokens // 10)
    facts = (shared_facts if shared else distinct_facts)(rng, enough_facts, split)
    document, stated = state_facts(rng, facts, target_tokens, tokenizer, split)
    questions = [question_about(rng, fact) for fact in stated]
    rng.shuffle(questions)
    return document, questions


def state_facts(
    rng: random.Random, facts: Sequence[Fact], target_tokens: int, tokenizer: Tokenizer, split: Split
) -> tuple[str, list[Fact]]:
    """State facts in their order with filler between them, as many as fit (one at least); return which those are."""
    sentences: list[str] = []
    stated: list[Fact] = []
    used_tokens = 0
    while len(stated) < len(facts):
        is_filler = rng.random() < FILLER_SHARE
        fact = facts[len(stated)]
        sentence = filler_sentence(rng, FILLER[split]) if is_filler else fact_sentence(rng, fact)
        used_tokens += len(tokenizer.encode(" " + sentence))
        if stated and used_tokens > target_tokens:
            break
        sentences.append(sentence)
        if not is_filler:
            stated.append(fact)
    return " ".join(sentences), stated
