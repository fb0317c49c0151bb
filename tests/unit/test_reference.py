"""Answers that rounding decides are refused, and others are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.worker.engine.sampler import SampleRow, sample
from services.worker.engine.uniform import uniform
from shared.messages.requests import SamplingParams
from tests import reference
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.reference import Reference, _drawn

PROMPT = [11, 12, 13, 14]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_an_answer_with_less_margin_than_is_asked_for_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled; with a margin that nothing reaches no prompt and no seed is found."""
    truth = Reference(llama)
    for name in ("LOGIT_MARGIN", "DRAW_MARGIN", "_PROMPTS_MOST", "_SEEDS_MOST"):
        monkeypatch.setattr(reference, name, 8 if name.endswith("MOST") else 1e9)

    with pytest.raises(AssertionError, match="rounding decides"):
        truth.greedy(PROMPT, 2)
    with pytest.raises(AssertionError, match="rounding decides"):
        truth.sampled(PROMPT, 2, temperature=TEMPERATURE, seed=1)
    with pytest.raises(AssertionError, match="none of 8 prompts"):
        truth.decided(lambda: PROMPT, 2)
    with pytest.raises(AssertionError, match="none of 8 seeds"):
        truth.decided_seed(PROMPT, 2, temperature=TEMPERATURE)


def test_the_first_decided_prompt_is_taken(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it are passed over, and what is found can be compared. With this margin most are not decided."""
    monkeypatch.setattr(reference, "LOGIT_MARGIN", 0.05)
    truth = Reference(llama)
    rng = random.Random(3)
    drawn: list[list[int]] = []

    def draw() -> list[int]:
        drawn.append([rng.randrange(8, VOCAB_SIZE) for _ in range(10)])
        return drawn[-1]

    found = [truth.decided(draw, 10, ignore_eos=True) for _ in range(8)]

    assert len(drawn) > len(found)
    for prompt in drawn:
        if prompt in found:
            assert len(truth.greedy(prompt, 10, ignore_eos=True)) == 10
        else:
            with pytest.raises(AssertionError, match="rounding decides"):
                truth.greedy(prompt, 10, ignore_eos=True)


def test_seeds_beside_one_another_draw_what_each_draws_alone(llama: Path) -> None:
    """The tokens of the seed that is found are those of an answer with this seed only."""
    seed = Reference(llama).decided_seed(PROMPT, 30, temperature=TEMPERATURE)
    alone = Reference(llama)

    tokens = alone.sampled(PROMPT, 30, temperature=TEMPERATURE, seed=seed)

    assert len(tokens) == 30
    assert Reference(llama).decided_seed(PROMPT, 30, temperature=TEMPERATURE) == seed


def test_draws_choose_as_the_sampler_does_and_tell_their_margin() -> None:
    """The same token for the same number, and the distance to the nearer end of its interval."""
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(max_tokens=1, temperature=TEMPERATURE, seed=seed) for seed in range(64)]
    rows = [SampleRow(each, output_position=3) for each in params]
    draws = torch.tensor([[uniform(n, 3)] for n in range(64)], dtype=torch.float64)

    tokens, _ = _drawn(logits, TEMPERATURE, draws)

    assert tokens.tolist() == [chosen.token for chosen in sample(logits, rows)]
    even = torch.zeros(1, 4)  # Intervals of a quarter each.
    for draw, token, margin in ((0.3, 1, 0.05), (0.45, 1, 0.05), (0.1, 0, 0.15), (0.9, 3, 0.15)):
        found, distance = _drawn(even, 1.0, torch.tensor([[draw]], dtype=torch.float64))
        assert found.tolist() == [token]
        assert distance.item() == pytest.approx(margin)
