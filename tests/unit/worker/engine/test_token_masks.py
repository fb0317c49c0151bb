"""Masks on logits, alone and with what else changes logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import sample
from services.worker.engine.token_masks import banned_by, mask_logits, without
from shared.messages.requests import SamplingParams

VOCAB_SIZE = 70


def words(*tokens: int) -> np.ndarray:
    bits = np.zeros(96, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def params(**given: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "temperature": 0, **given})  # type: ignore[arg-type]


def test_only_what_a_mask_allows_keeps_its_logit() -> None:
    """Every row keeps the logits of its own mask's tokens, also those of the last, incomplete word."""
    logits = torch.arange(2 * VOCAB_SIZE, dtype=torch.float32).view(2, VOCAB_SIZE)
    before = logits.clone()
    mask_logits(logits, [words(0, 31, 32), words(63, 64, 69)])

    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [0, 31, 32]
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [63, 64, 69]
    assert torch.equal(logits[1, 63:65], before[1, 63:65])


def test_masks_are_unpacked_alike_on_a_device() -> None:
    """What a device makes of the words bans the same tokens as what a CPU makes of them."""
    masks = [words(1), words(*range(0, 70, 3)), words(31, 69)]
    banned = banned_by(torch.from_numpy(np.stack(masks)), VOCAB_SIZE)
    logits = torch.zeros(3, VOCAB_SIZE)
    mask_logits(logits, masks)

    assert torch.equal(banned, torch.isneginf(logits))


def test_a_mask_outweighs_what_else_is_forbidden() -> None:
    """Tokens that are forbidden are taken from a mask, unless it would be empty."""
    assert without(words(3, 40), [40, 200, -1]).tolist() == words(3).tolist()
    assert without(words(3, 40), [40, 3]).tolist() == words(3, 40).tolist()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"logit_bias": {9: 100.0, 5: -100.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"temperature": 2.0, "top_p": 0.1, "top_k": 3, "min_p": 0.9, "seed": 3},
    ],
)
def test_nothing_brings_a_banned_token_back(given: dict[str, object]) -> None:
    """Whatever the sampling parameters, the token is one that the mask allows."""
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    row = SampleRow(params(**given), 0, prompt_ids=[9, 5], output_ids=[9], allowed=words(5, 68))
    drawn = sample(logits, [row] * 4)

    assert {each.token for each in drawn} <= {5, 68}


def test_a_row_without_a_mask_is_as_it_was() -> None:
    """A masked row changes nothing of the others, and logprobs are those of the model, not of what was allowed."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    free = SampleRow(params(logprobs=1), 0)
    alone = sample(logits, [free] * 3)
    mixed = sample(logits, [free, SampleRow(params(logprobs=1), 0, allowed=words(7)), free])

    assert [mixed[0], mixed[2]] == [alone[0], alone[2]]
    assert mixed[1].token == 7
    assert mixed[1].logprob is not None
    assert mixed[1].logprob.logprob == pytest.approx(float(torch.log_softmax(logits[1], 0)[7]), abs=1e-5)


def test_a_grammar_that_cannot_go_on_says_why() -> None:
    """A mask without a token ends its row with the fault of its grammar, and no other row."""
    stuck = SampleRow(params(), 0, allowed=words(), fault="its grammar is too complex")
    failed, fine = sample(torch.zeros(2, VOCAB_SIZE), [stuck, SampleRow(params(), 0)])

    assert failed.error is not None
    assert "its grammar is too complex" in failed.error.message
    assert fine.token == 0
