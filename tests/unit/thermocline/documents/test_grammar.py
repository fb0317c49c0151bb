"""The grammar: repeatable, split by name, sized in tokens."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from thermocline.documents import grammar
from thermocline.documents.filler import SENTENCES
from thermocline.documents.grammar import Split, make_document, make_name, split_of

ROOT = Path(__file__).parents[4]
TOKENIZER: Any = Tokenizer.from_file(str(ROOT / "models" / "thermocline-mha" / "tokenizer.json"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_seed_gives_one_document(shared: bool) -> None:
    """The same seed gives the same document and questions; another seed gives others."""
    first = make_document(random.Random(3), 300, TOKENIZER, shared=shared)
    again = make_document(random.Random(3), 300, TOKENIZER, shared=shared)
    other = make_document(random.Random(4), 300, TOKENIZER, shared=shared)

    assert first == again
    assert first != other


def test_held_out_names_never_occur_in_training() -> None:
    """No name drawn for one split can be drawn for the other."""
    rng = random.Random(0)
    training = {make_name(rng, Split.TRAINING) for _ in range(3000)}
    held_out = {make_name(rng, Split.HELDOUT) for _ in range(1000)}

    assert training.isdisjoint(held_out)
    assert all(split_of(name) is Split.HELDOUT for name in held_out)


def test_filler_is_split_too() -> None:
    """Each filler sentence belongs to one split, and both splits have some."""
    training, held_out = grammar.FILLER[Split.TRAINING], grammar.FILLER[Split.HELDOUT]

    assert set(training).isdisjoint(held_out)
    assert len(training) + len(held_out) == len(SENTENCES)
    assert len(held_out) >= 10


@pytest.mark.parametrize("tokens", [128, 512, 2048])
@pytest.mark.parametrize("shared", [False, True])
def test_a_document_has_the_tokens_asked_for(tokens: int, shared: bool) -> None:
    """A document never exceeds its target and falls short by less than two sentences."""
    document, questions = make_document(random.Random(tokens), tokens, TOKENIZER, shared=shared)
    size = len(TOKENIZER.encode(document))

    assert tokens - 50 < size <= tokens
    assert len(questions) >= tokens // 40


def test_every_question_has_one_answer_that_the_document_states() -> None:
    """The easy set asks one question of an entity, and the document holds its answer."""
    document, questions = make_document(random.Random(5), 1024, TOKENIZER)

    assert len({question.text for question in questions}) == len(questions)
    assert all(f" {question.answer}." in document for question in questions)


def test_entities_recur_only_in_the_hard_set() -> None:
    """Distinct facts have as many entities as facts, shared facts have fewer."""
    rng = random.Random(6)
    distinct = grammar.distinct_facts(rng, 40, Split.HELDOUT)
    shared = grammar.shared_facts(rng, 40, Split.HELDOUT)

    assert len({fact.entity for fact in distinct}) == 40
    assert len({fact.entity for fact in shared}) < 20
    assert len({(fact.entity, fact.attribute) for fact in shared}) == 40


def test_the_grammar_needs_no_torch() -> None:
    """Importing the grammar, as the demo does, does not import torch."""
    code = "import sys, thermocline.documents.grammar; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
