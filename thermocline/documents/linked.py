"""Documents with questions whose answers take one or more sentences of the document.

Some facts link one entity to another ("The supplier of project Tabor is the Braxol clinic."). Kinds of questions:

* ``one``: the value of an attribute of an entity;
* ``several``: two values from two places of the document;
* ``hops``: an attribute of a linked entity, which the question does not name.

Entities and attributes recur, so every fact has distractors that share one of the two with it. Like :mod:`grammar`,
this module does not import torch, and everything random comes from the ``random.Random`` that is passed in.
"""

import random
from dataclasses import dataclass
from typing import Literal

from thermocline.documents.grammar import (
    Fact,
    Question,
    Split,
    Tokenizer,
    question_about,
    shared_facts,
    state_facts,
)

Kind = Literal["one", "several", "hops"]
KINDS: tuple[Kind, ...] = ("one", "several", "hops")

LINKS = ("supplier", "partner", "successor", "neighbour")
"""Attributes whose value is another entity."""

LINKS_SHARE = 0.15
"""Share of links among the facts of a document."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its kind."""

    question: Question
    kind: Kind


def linked_facts(rng: random.Random, count: int, split: Split) -> list[Fact]:
    """Draw about ``count`` facts in a random order; LINKS_SHARE of them link entities of the others."""
    facts = shared_facts(rng, max(4, round(count * (1 - LINKS_SHARE))), split)
    entities = list(dict.fromkeys(fact.entity for fact in facts))
    places = [(entity, link) for entity in entities for link in LINKS]
    for entity, link in rng.sample(places, min(len(places), max(1, round(count * LINKS_SHARE)))):
        others = [other for other in entities if other != entity]
        if others:
            facts.append(Fact(entity, link, rng.choice(others)))
    rng.shuffle(facts)
    return facts


def questions_about(rng: random.Random, stated: list[Fact]) -> list[Asked]:
    """Return questions in random order: one per fact, about half as many on two, and at most two hops per link."""
    asked = [Asked(question_about(rng, fact), "one") for fact in stated]
    plain = [fact for fact in stated if fact.attribute not in LINKS]
    for first, second in zip(*(rng.sample(plain, len(plain)) for _ in range(2)), strict=True):
        if first is not second and rng.random() < 0.5:
            asked.append(Asked(_several(first, second), "several"))
    for link in stated:
        if link.attribute in LINKS:
            ends = [fact for fact in plain if fact.entity == link.value]
            asked += [Asked(_hop(link, fact), "hops") for fact in rng.sample(ends, min(2, len(ends)))]
    rng.shuffle(asked)
    return asked


def make_linked_document(
    rng: random.Random, target_tokens: int, tokenizer: Tokenizer, *, split: Split = Split.HELDOUT
) -> tuple[str, list[Asked]]:
    """Make a document of at most about ``target_tokens`` tokens and its questions, as :func:`make_document` does."""
    facts = linked_facts(rng, max(4, target_tokens // 10), split)
    document, stated = state_facts(rng, facts, target_tokens, tokenizer, split)
    return document, questions_about(rng, stated)


def _several(first: Fact, second: Fact) -> Question:
    text = f"What are the {first.attribute} of {first.entity} and the {second.attribute} of {second.entity}?"
    return Question(text, f"{first.value} and {second.value}")


def _hop(link: Fact, fact: Fact) -> Question:
    return Question(f"What is the {fact.attribute} of the {link.attribute} of {link.entity}?", fact.value)
