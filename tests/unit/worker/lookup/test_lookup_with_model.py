"""Proposals on real models: answers and logprobs have the bits that they have without, whatever computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from transformers import MixtralConfig

from services.worker.counters import Counters
from services.worker.detokenizer import Vocabulary
from services.worker.engine.fused.choice import ForwardPath
from services.worker.lookup.ngram_index import NgramIndex
from shared.messages.requests import SamplingParams
from shared.messages.tokens import TokenLogprob
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, save_checkpoint
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import SHM_PREFIX
from tests.unit.worker.runners import LoadRunner, runners_of

ANSWER = 48
MIXTRAL = MixtralConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    sliding_window=None,
)
PAGES = 16
WAYS: list[tuple[str, str, ForwardPath]] = [
    ("llama", "float32", "fused"),
    ("llama", "bfloat16", "fused"),
    ("llama", "bfloat16", "portable"),
    ("gemma2", "float32", "portable"),
    ("mistral", "float32", "portable"),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadRunner]:
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (
                save_checkpoint(MIXTRAL, folder) if family == "mixtral" else make_checkpoint(family, folder, seed=3)
            )
        return made[family]

    with runners_of(checkpoint, SHM_PREFIX) as given:
        given.checkpoint = checkpoint  # type: ignore[attr-defined]
        yield given


@contextmanager
def proposing(texts: Sequence[list[int]]) -> Iterator[None]:
    """Within this block proposals are how these texts really go on, with every fifth token another."""

    def continuation(index: NgramIndex, most: int) -> tuple[int, ...]:
        known = list(index._tokens)
        text = next((each for each in texts if each[: len(known)] == known), known)
        return tuple(
            token if place % 5 else token - 1 for place, token in enumerate(text[len(known) :][:most], len(known))
        )

    with patch.object(NgramIndex, "continuation", continuation):
        yield


def prompt_of(number: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(number).integers(6, VOCAB_SIZE, 21 + 7 * number).tolist()
    return drawn


def answers(driven: Driven) -> dict[str, tuple[list[int], list[TokenLogprob]]]:
    """Three requests that decode together."""
    for number, temperature in enumerate((0.0, 0.7, 0.0)):
        prompt, name = prompt_of(number), f"r{number}"
        driven.give(
            admit(
                prompt,
                range(number * PAGES, (number + 1) * PAGES),
                request_id=name,
                params=SamplingParams(
                    max_tokens=ANSWER, min_tokens=ANSWER, temperature=temperature, seed=number, top_k=3, logprobs=2
                ),
            ),
            batch(chunk(0, len(prompt), request_id=name)),
        )
    driven.run()
    return {
        f"r{number}": (
            driven.tokens(f"r{number}"),
            [logprob for item in driven.items(f"r{number}") for logprob in item.logprobs],
        )
        for number in range(3)
    }


@pytest.mark.parametrize(("family", "dtype", "forward"), WAYS)
def test_bits_do_not_depend_on_proposals(load: LoadRunner, family: str, dtype: str, forward: ForwardPath) -> None:
    """Tokens are the same and logprobs equal to the bit, where rows are computed one by one and where several are."""
    words = Vocabulary.from_directory(load.checkpoint(family))  # type: ignore[attr-defined]

    def run(lookup_tokens: int) -> tuple[dict[str, tuple[list[int], list[TokenLogprob]]], Counters]:
        runner = load(family, page_size=8, tokens=8 * PAGES * 3, dtype=dtype, forward=forward)
        driven = Driven(runner, words, submit=None, lookup_tokens=lookup_tokens)
        try:
            return answers(driven), driven.executor.counters
        finally:
            driven.close()

    expected, _ = run(0)
    with proposing([prompt_of(number) + expected[f"r{number}"][0] for number in range(3)]):
        found, counters = run(8)

    assert found == expected
    assert counters.tokens_accepted > 50
    assert counters.tokens_proposed - counters.tokens_accepted > 5


def test_experts_are_an_obstacle(load: LoadRunner) -> None:
    """Rows of a model that routes them round by one another, so that proposals could change its tokens."""
    assert "experts" in load("mixtral", tokens=64).lookup_obstacle
    assert load("llama", tokens=64).lookup_obstacle == ""
