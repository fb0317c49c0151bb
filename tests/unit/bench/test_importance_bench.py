"""The benchmark of importance: its prompts, and what it counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.importance_asking import Asker
from bench.importance_prompts import EXAMPLES, prefixes
from bench.importance_similarity import load, watch
from services.worker.importance.important_prefix import LoadingRule
from services.worker.importance.selection import Budget

MODEL = Path(__file__).parents[3] / "models" / "thermocline-gqa"


@pytest.fixture
def asker() -> Iterator[Asker]:
    made = Asker(MODEL, 512)
    yield made
    made.runner.close()


def test_questions_follow_one_prefix() -> None:
    """Examples belong to the few-shot prefix, every question has tokens of its own, equal seeds give equal prompts."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (documents,) = prefixes("documents", 1, 256, 3, tokenizer, 1)
    (few_shot,) = prefixes("few_shot", 1, 256, 2, tokenizer, 1)

    assert tokenizer.decode(documents.tokens).count("<|user|>") == 1
    assert tokenizer.decode(few_shot.tokens).count("<|assistant|>") == EXAMPLES
    assert [bool(ids) for ids, _ in (*documents.questions, *few_shot.questions)] == [True] * 5
    assert prefixes("documents", 1, 256, 3, tokenizer, 1) == [documents]


def test_loading_everything_answers_as_ever(asker: Asker) -> None:
    """At ratio 1 the answer is the one with all KV, all of it is needed, and all that was read ahead is of use."""
    (prefix,) = prefixes("documents", 1, 192, 2, asker.tokenizer, 1)
    source = asker.take(prefix)
    question, expected = prefix.questions[0]
    figures: dict[str, list[float]] = defaultdict(list)

    answer = load(asker, source, question, LoadingRule(Budget(1.0)), figures)

    assert answer == asker.answer(question, source.tokens) == expected
    assert (figures["needed"], figures["wasted"], figures["fallback"]) == ([1.0], [0.0], [0.0] * 4)
    assert (figures["recall"], figures["precision"], figures["random_recall"]) == ([1.0] * 3, [1.0] * 3, [1.0] * 3)


def test_a_quarter_of_a_document_answers_a_question(asker: Asker) -> None:
    """The model was trained to look facts up, and what its last query token looks at is where the answer stands."""
    (prefix,) = prefixes("documents", 1, 192, 2, asker.tokenizer, 1)
    source = asker.take(prefix)
    question, expected = prefix.questions[0]
    figures: dict[str, list[float]] = defaultdict(list)

    answer = load(asker, source, question, LoadingRule(Budget(0.25), "last_pooled"), figures)

    assert answer == expected
    assert figures["read"][0] < 0.76  # All keys, because three probe heads are all KV heads, and half of a half.


def test_watching_notes_every_layer(asker: Asker) -> None:
    """Similarity of heads in each layer, of neighbours in all but the first; more tokens get more of the attention."""
    (prefix,) = prefixes("documents", 1, 192, 2, asker.tokenizer, 1)
    asker.take(prefix)
    figures: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    watch(asker, prefix.questions[0][0], len(prefix.tokens), figures)

    few, many = figures["h2o", 0.05, 2], figures["h2o", 0.5, 2]
    assert 0 < few["mass"][0] < many["mass"][0] <= 1
    assert 0 < many["heads"][0] < 1
    assert 0 < many["adjacent"][0] < 1
    assert "adjacent" not in figures["h2o", 0.5, 0]
