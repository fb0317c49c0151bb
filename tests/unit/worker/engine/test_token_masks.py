"""Masks on logits, alone and with what else changes logits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.masked_choice import NO_TOKEN, choose_masked
from services.worker.engine.row_choice import choose_in_row
from services.worker.engine.sample_row import SampleRow
from services.worker.engine.sampler import sample
from services.worker.engine.token_choice import choose
from services.worker.engine.token_masks import allowed_ids, ban_others, without
from services.worker.engine.uniform import uniform
from shared.messages.requests import SamplingParams

VOCAB_SIZE = 70


def words(*tokens: int, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """The mask of these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def params(**given: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "temperature": 0, **given})  # type: ignore[arg-type]


SETTINGS = [
    params(temperature=temperature, seed=9, **filters)
    for temperature in (0.0, 0.3, 1.0)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01})
]


def test_only_what_a_mask_allows_keeps_its_logit() -> None:
    """Rows with a mask keep the logits of its tokens, also those of the last, incomplete word; other rows stay."""
    logits = torch.arange(3 * VOCAB_SIZE, dtype=torch.float32).view(3, VOCAB_SIZE)
    longer = np.append(words(63, 64, 69), np.int32(-1))  # Of a tokenizer that knows more tokens.
    banned = ban_others(logits, {2: words(0, 31, 32), 0: longer})

    assert torch.isfinite(banned[2]).nonzero().flatten().tolist() == [0, 31, 32]
    assert torch.isfinite(banned[0]).nonzero().flatten().tolist() == [63, 64, 69]
    assert torch.equal(banned[1], logits[1])
    assert torch.equal(banned[0, 63:65], logits[0, 63:65])


@pytest.mark.parametrize("vocab_size", [70, 64, 4096])
@pytest.mark.parametrize("kept", [0.0, 0.002, 0.7, 1.0])
def test_allowed_ids_are_the_bits_that_are_set(vocab_size: int, kept: float) -> None:
    """Few or many, of masks with more words than the vocabulary and of masks that allow nothing."""
    rng = np.random.default_rng(7)
    bits = rng.random((3, 64 * 67)) < kept
    bits[1] = False
    masks = [np.packbits(row, bitorder="little").view(np.int32)[: 200 if row is bits[2] else None] for row in bits]
    ids, edges = allowed_ids(masks, vocab_size)

    expected = [np.flatnonzero(row[:vocab_size]) + number * vocab_size for number, row in enumerate(bits)]
    assert [ids[start:end].tolist() for start, end in itertools.pairwise(edges)] == [one.tolist() for one in expected]


@given(data=st.data())
def test_masked_rows_together_are_as_each_alone(data: st.DataObject) -> None:
    """Whatever their filters, sizes and neighbours, those too that have no token."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    vocab_size = data.draw(st.sampled_from([7, 256, 5003]))
    settings = data.draw(st.lists(st.sampled_from(SETTINGS), min_size=1, max_size=7))
    logits = rng.standard_normal((len(settings), vocab_size), dtype=np.float32) * 4
    logits[rng.random(logits.shape) < 0.2] = 1.5
    allowed = [rng.random(vocab_size) < rng.choice([0.001, 0.03, 0.9]) for _ in settings]
    for row in data.draw(st.sets(st.integers(0, len(settings) - 1), max_size=2)):
        logits[row, np.flatnonzero(allowed[row])[:1]] = rng.choice([np.nan, np.inf])
    rows = [SampleRow(each, number) for number, each in enumerate(settings)]
    masks = [words(*np.flatnonzero(bits), vocab_size=vocab_size) for bits in allowed]
    found = choose_masked(logits, rows, masks)

    assert found == [
        choose_alone(values, row, np.flatnonzero(bits)) for values, row, bits in zip(logits, rows, allowed, strict=True)
    ]


def choose_alone(values: np.ndarray, row: SampleRow, ids: np.ndarray) -> int:
    """The token of one row, of ``ids``."""
    kept = values[ids]
    if not len(ids) or not np.isfinite(kept.max()):
        return NO_TOKEN
    if row.params.temperature == 0:
        return int(ids[kept.argmax()])
    chance = uniform(row.params.seed, row.output_position)
    return int(ids[choose_in_row(kept, int(kept.argmax()), row.params, chance)])


@given(data=st.data())
def test_what_is_allowed_is_chosen_as_if_the_rest_had_no_weight(data: st.DataObject) -> None:
    """A CPU, which looks at the allowed tokens alone, chooses what is chosen among all of which the rest is banned."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    allowed = data.draw(st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1))
    drawn = params(
        temperature=data.draw(st.sampled_from([0.1, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 3, 60])),
        top_p=data.draw(st.sampled_from([1.0, 0.9, 0.1])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.9])),
        seed=seed,
    )
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    (chosen,) = sample(logits, [SampleRow(drawn, 3, allowed=words(*allowed))])
    banned = ban_others(logits, {0: words(*allowed)})

    assert chosen.token == choose(banned, banned.max(dim=1).values, [drawn], [uniform(seed, 3)]).item()


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
