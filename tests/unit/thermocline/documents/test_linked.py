"""Documents whose questions take more than one sentence to answer."""

from __future__ import annotations

import random

import pytest

from thermocline.documents.grammar import Split, split_of
from thermocline.documents.linked import KINDS, LINKS, linked_facts, make_linked_document, questions_about


class Words:
    """A tokenizer of words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_is_asked_and_its_answer_stands_in_the_document(seed: int) -> None:
    """Both values where there are two; of a hop the question does not name the entity that has the value."""
    document, asked = make_linked_document(random.Random(seed), 900, Words())

    assert {each.kind for each in asked} == set(KINDS)
    assert len(document.split()) <= 900
    for each in asked:
        assert all(part in document for part in each.question.answer.split(" and "))


def test_a_hop_goes_over_the_entity_that_a_link_names() -> None:
    """The answer is the value of a stated fact of that entity, and no other value fits."""
    facts = linked_facts(random.Random(7), 80, Split.TRAINING)
    values = {(fact.entity, fact.attribute): fact.value for fact in facts}
    hops = [each.question for each in questions_about(random.Random(8), facts) if each.kind == "hops"]

    assert len(values) == len(facts)
    assert hops
    for question in hops:
        attribute, link, entity = question.text.removeprefix("What is the ").removesuffix("?").split(" of ")
        named = values[entity, link.removeprefix("the ")]
        assert link.removeprefix("the ") in LINKS
        assert question.answer == values[named, attribute]
        assert named not in question.text


def test_the_same_seed_makes_the_same_document_of_its_split() -> None:
    """Names are those of the split that is asked for."""
    one, other = (make_linked_document(random.Random(3), 300, Words()) for _ in range(2))
    facts = linked_facts(random.Random(4), 40, Split.HELDOUT)

    assert one == other
    names = {fact.entity.removeprefix("project ").split()[-1] for fact in facts if fact.entity.startswith("project ")}
    assert all(split_of(name) is Split.HELDOUT for name in names)
