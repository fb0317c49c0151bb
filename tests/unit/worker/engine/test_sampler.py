"""Sampling: pure in (logits, params, position), equal to naive references, independent of the batch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from services.worker.engine.row_choice import choose_in_row
from services.worker.engine.sample_row import forbidden_ids
from services.worker.engine.sampler import SampleRow, choose_unread, may_be_unread, prompt_logprobs, sample
from services.worker.engine.token_choice import TOP_P_CANDIDATES, choose
from services.worker.engine.uniform import uniform
from shared.messages.requests import SamplingParams

VOCAB = 97


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **changes})  # type: ignore[arg-type]


def draw_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """Random logits with many ties, as bfloat16 models give."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2).bfloat16().float()


def naive_distribution(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The distribution by the definitions, token by token, in double precision."""
    edited = [x + p.logit_bias.get(token, 0.0) for token, x in enumerate(logits)]
    for token in set(prompt) | set(output):
        x = edited[token]
        edited[token] = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    for token, count in Counter(output).items():
        edited[token] -= p.frequency_penalty * count + p.presence_penalty
    scaled = np.array(edited) / p.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < p.min_p * weights.max()] = 0
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    for token in order[p.top_k or len(order) :]:
        weights[token] = 0
    weights /= weights.sum()
    before = 0.0
    for token in order:
        probability = weights[token]
        if before >= p.top_p and before > 0:
            weights[token] = 0
        before += probability
    share: np.ndarray = weights / weights.sum()
    return share


SETTINGS = [
    params(),
    params(temperature=0.3),
    params(temperature=1.7, top_k=5),
    params(top_k=1),
    params(top_p=0.6),
    params(top_p=0.0),
    params(top_k=20, top_p=0.8),
    params(min_p=0.2),
    params(temperature=1.3, min_p=0.02, top_k=30, top_p=0.9),
    params(presence_penalty=1.5),
    params(frequency_penalty=0.7, temperature=0.8),
    params(repetition_penalty=1.8, top_k=12),
    params(repetition_penalty=0.6, frequency_penalty=-0.5, presence_penalty=-1.0),
    params(logit_bias={3: 5.0, 4: -100.0, 90: 2.5}, top_p=0.95),
]
PROMPT, OUTPUT = [1, 2, 3, 3, 50], [3, 7, 7, 7, 60]


@pytest.mark.parametrize("setting", SETTINGS, ids=range(len(SETTINGS)))
def test_each_uniform_gives_the_token_of_the_naive_inverse_cdf(setting: SamplingParams) -> None:
    """For every drawn number the token is the one at which the naive cumulative distribution passes it."""
    logits = draw_logits(1, seed=1)
    distribution = naive_distribution(logits[0].tolist(), setting, PROMPT, OUTPUT)
    edges = np.cumsum(distribution)

    rows = [SampleRow(setting, position, PROMPT, OUTPUT) for position in range(300)]
    for position, sampled in enumerate(sample(logits.expand(300, -1), rows)):
        number = uniform(setting.seed, position)

        assert distribution[sampled.token] > 0
        assert edges[sampled.token] - distribution[sampled.token] - 1e-6 <= number <= edges[sampled.token] + 1e-6


@pytest.mark.parametrize("vocab", [VOCAB, 5003])
def test_a_row_is_sampled_alike_alone_and_in_any_batch(vocab: int) -> None:
    """Every row of a batch of all settings gets, to the bit, what it gets alone, in whatever order."""
    settings = [*SETTINGS, params(temperature=0.0), params(temperature=0.0, presence_penalty=1.0, logprobs=3)]
    settings += [params(logprobs=5, top_p=0.999), params(top_k=2000, top_p=0.97, logprobs=0)]
    logits = draw_logits(len(settings), seed=2, vocab=vocab)
    rows = [SampleRow(setting, 17 + n, PROMPT, OUTPUT, forbid=(n,)) for n, setting in enumerate(settings)]
    order = np.random.default_rng(0).permutation(len(rows))

    together = sample(logits[torch.from_numpy(order)], [rows[n] for n in order])

    alone = [sample(logits[n : n + 1], [rows[n]])[0] for n in order]
    assert together == alone


FILTERS = [
    params(),
    params(temperature=0.3),
    params(temperature=1e-38),
    params(temperature=40.0, top_p=0.99),
    params(min_p=0.3),
    params(min_p=1.0),
    params(min_p=1e-9, top_p=0.9),
    params(top_k=1),
    params(top_k=7, top_p=0.5),
    params(top_k=10_000, top_p=0.8, min_p=0.001),
    params(top_p=0.0),
    params(top_p=0.37),
    params(temperature=3.0, top_k=600),
    params(top_p=1 - 1e-9),
]


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 5003])
def test_cpus_and_gpus_choose_the_same_tokens(vocab: int) -> None:
    """Row by row and all at once, whatever the filters and however many weights are equal."""
    rows = [setting for setting in FILTERS for _ in range(40)]
    uniforms = [uniform(5, number) for number in range(len(rows))]
    uniforms[::40], uniforms[1::40] = [0.0] * len(FILTERS), [1 - 2**-53] * len(FILTERS)
    logits = draw_logits(len(rows), seed=vocab, vocab=vocab)
    logits[:, 3::3] = logits[:, :1]
    logits[2::5, -1] = float("-inf") if vocab > 1 else 0.0
    best = logits.max(dim=1).values

    each = zip(logits.numpy(), logits.argmax(dim=1).tolist(), rows, uniforms, strict=True)
    assert [choose_in_row(*row) for row in each] == choose(logits, best, rows, uniforms).tolist()


def test_wide_top_p_beyond_the_first_candidates_is_exact() -> None:
    """A top-p that keeps thousands of tokens keeps exactly those that a full sort keeps."""
    logits = draw_logits(1, seed=3, vocab=20_000)
    setting = params(top_p=0.9)
    distribution = naive_distribution(logits[0].tolist(), setting, [], [])
    rows = [SampleRow(setting, position) for position in range(500)]

    tokens = [s.token for s in sample(logits.expand(500, -1), rows)]

    assert (distribution > 0).sum() > 2000
    assert (distribution[tokens] > 0).all()
    assert len(set(tokens)) > 300


def test_the_result_does_not_depend_on_another_seed_or_position_by_accident() -> None:
    """Neighbouring seeds and positions draw unrelated numbers, evenly spread."""
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(-50, 50)])

    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 0.01
    correlations = np.corrcoef(numbers)[~np.eye(100, dtype=bool)]
    assert np.abs(correlations).max() < 0.35


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    """Temperature 0 is argmax, smaller ids first, and so is top_k=1 at any temperature."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])

    tokens = [
        sample(logits, [SampleRow(params(**setting), position)])[0].token
        for setting in ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0})
        for position in range(20)
    ]

    assert set(tokens) == {1}


def test_tiny_and_huge_temperatures_are_safe() -> None:
    """No temperature overflows: towards 0 sampling becomes greedy, towards infinity uniform."""
    logits = draw_logits(1, seed=4)
    best = int(logits.argmax())
    tokens = {
        temperature: {sample(logits, [SampleRow(params(temperature=temperature), n)])[0].token for n in range(200)}
        for temperature in (1e-300, 1e-6, 1e6, 1e300)
    }

    assert set(logits[0, sorted(tokens[1e-300])].tolist()) == {float(logits[0, best])}
    assert set(logits[0, sorted(tokens[1e-6])].tolist()) == {float(logits[0, best])}
    assert len(tokens[1e6]) > 60
    assert len(tokens[1e300]) > 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_get_an_error_of_their_own(temperature: float) -> None:
    """NaN, infinity and a ban of everything fail their own row; the others are sampled as usual."""
    logits = draw_logits(4, seed=5)
    logits[0, 13], logits[1, 14] = float("nan"), float("inf")
    setting = params(temperature=temperature, logprobs=2)
    rows = [SampleRow(setting, 0, forbid=tuple(range(VOCAB)) if n == 2 else ()) for n in range(4)]

    sampled = sample(logits, rows)

    assert [s.token for s in sampled[:3]] == [-1, -1, -1]
    messages = [s.error.message for s in sampled[:3] if s.error is not None]
    assert ["banned" in message for message in messages] == [False, False, True]
    assert sampled[3] == sample(logits[3:], rows[3:])[0]
    assert sampled[3].error is None
    assert sampled[3].logprob is not None


def test_forbidden_tokens_are_never_chosen() -> None:
    """A banned token is not chosen even where a bias favours it; ids beyond the vocabulary are ignored."""
    logits = torch.zeros(1, 4)
    rows = [
        SampleRow(params(temperature=t, logit_bias={2: 100.0, 999: 1.0}, seed=n), n, forbid=(2, 0, 12345))
        for n in range(50)
        for t in (0.0, 1.0)
    ]

    assert {s.token for s in sample(logits.expand(len(rows), -1), rows)} == {1, 3}


def test_forbidden_ids_follow_min_tokens() -> None:
    """Until min_tokens all that would end the answer is banned: stop tokens, and EOS unless it is ignored."""
    setting = params(min_tokens=3, stop_token_ids=(8,))

    assert forbidden_ids(setting, 2, (1, 2)) == (8, 1, 2)
    assert forbidden_ids(setting, 3, (1, 2)) == ()
    assert forbidden_ids(params(min_tokens=3, ignore_eos=True), 0, (1, 2)) == ()


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Logprobs ignore temperature, penalties, bias and filters; top tokens are ordered by logprob, then id."""
    logits = draw_logits(1, seed=6)
    setting = params(temperature=0.5, top_k=3, logit_bias={5: 50.0}, presence_penalty=2.0, logprobs=7)
    (sampled,) = sample(logits, [SampleRow(setting, 0, PROMPT, OUTPUT)])

    raw = torch.log_softmax(logits[0].double(), 0).tolist()
    order = sorted(range(VOCAB), key=lambda token: (-logits[0, token].item(), token))[:7]
    assert sampled.token == 5
    assert sampled.logprob is not None
    assert math.isclose(sampled.logprob.logprob, raw[5], abs_tol=1e-5)
    assert [token for token, _ in sampled.logprob.top] == order
    assert np.allclose([value for _, value in sampled.logprob.top], [raw[token] for token in order], atol=1e-5)


def test_logprobs_of_none_zero_and_all() -> None:
    """None gives none, 0 only the chosen token's, and more than the vocabulary all of it; -inf becomes -9999."""
    logits = torch.tensor([[1.0, float("-inf"), 0.0]])
    results = [
        sample(logits, [SampleRow(params(temperature=0.0, logprobs=count), 0)])[0].logprob for count in (None, 0, 20)
    ]

    assert results[0] is None
    assert results[1] is not None
    assert results[1].token == 0
    assert results[1].top == ()
    assert results[2] is not None
    assert [token for token, _ in results[2].top] == [0, 2, 1]
    assert results[2].top[2][1] == -9999.0


def test_prompt_logprobs_are_of_the_tokens_that_follow() -> None:
    """Row t is asked about the token after t."""
    logits = draw_logits(3, seed=7)
    next_ids = [4, 0, 96]

    found = prompt_logprobs(logits, next_ids, 2)

    raw = torch.log_softmax(logits.double(), -1)
    assert [entry.token for entry in found] == next_ids
    assert np.allclose(
        [entry.logprob for entry in found], [raw[t, token] for t, token in enumerate(next_ids)], atol=1e-5
    )
    assert [len(entry.top) for entry in found] == [2, 2, 2]
    assert prompt_logprobs(logits[:0], [], 2) == []


@pytest.mark.parametrize("count", [0, 2, VOCAB])
def test_a_prompt_token_has_its_rank_however_unlikely(count: int) -> None:
    """Its place among all tokens, by logprob and then by id as those listed beside it; impossible tokens tie."""
    inf = float("-inf")
    logits = torch.cat([draw_logits(3, seed=7), torch.tensor([[1.0, 5.0, 5.0, inf, inf] + [0.0] * (VOCAB - 5)])])
    logits = torch.cat([logits, logits[-1:], logits[-1:]])
    next_ids = [4, 0, 96, 2, 4, 0]

    found = prompt_logprobs(logits, next_ids, count)

    orders = [sorted(range(VOCAB), key=lambda token: (-row[token].item(), token)) for row in logits]
    assert [each.rank for each in found] == [1 + order.index(t) for order, t in zip(orders, next_ids, strict=True)]
    assert [each.rank for each in found[3:]] == [2, VOCAB, 3]
    assert [[token for token, _ in each.top] for each in found] == [order[:count] for order in orders]


def test_logits_stay_as_they_are() -> None:
    """Sampling changes nothing in its input, and no rows give no tokens."""
    logits = draw_logits(2, seed=8)
    before = logits.clone()
    sample(logits, [SampleRow(setting, 0, PROMPT, OUTPUT, forbid=(1,)) for setting in (SETTINGS[12], SETTINGS[13])])

    assert torch.equal(logits, before)
    assert sample(logits[:0], []) == []


UNREAD = [setting for setting in SETTINGS if may_be_unread(SampleRow(setting, 0))]


def test_tokens_that_nobody_reads_are_those_that_are_read() -> None:
    """Greedy rows and drawn ones together, whatever filters each has."""
    rows = [SampleRow(setting, position) for position, setting in enumerate([params(temperature=0), *UNREAD] * 3)]
    logits = draw_logits(len(rows), seed=7)

    tokens, are_right = choose_unread(logits, rows).tolist()

    assert tokens == [each.token for each in sample(logits, rows)]
    assert are_right == [1] * len(rows)


def test_a_wrong_guess_of_top_p_is_told() -> None:
    """Of two rows, one keeps more tokens than are looked at; with a top-k, or where it is looked at all, none does."""
    vocab = 4 * TOP_P_CANDIDATES
    logits = torch.stack([torch.zeros(vocab), torch.arange(vocab, 0, -1).float()])
    wide = [SampleRow(params(top_p=0.9), 0), SampleRow(params(top_p=0.9), 0)]
    bounded = [SampleRow(params(top_p=0.9, top_k=2000), 0)] * 2

    assert choose_unread(logits, wide)[1].tolist() == [0, 1]
    assert choose_unread(logits, bounded)[1].tolist() == [1, 1]
    assert choose_unread(logits[:, :TOP_P_CANDIDATES], wide)[1].tolist() == [1, 1]
    assert choose_unread(logits, wide)[0, 1] == sample(logits, wide)[1].token


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_token_are_told_and_get_one_of_the_vocabulary(bad: float) -> None:
    """The next step looks it up before anybody knows. Their neighbours are not affected."""
    for setting in [params(temperature=0), *UNREAD]:
        logits = draw_logits(3, seed=5)
        expected = sample(logits, [SampleRow(setting, 0)] * 3)
        logits[1] = bad

        tokens, are_right = choose_unread(logits, [SampleRow(setting, 0)] * 3).tolist()

        assert are_right == [1, 0, 1]
        assert 0 <= tokens[1] < VOCAB
        assert (tokens[0], tokens[2]) == (expected[0].token, expected[2].token)


def test_what_needs_the_host_is_never_left_unread() -> None:
    """Edits of logits, masks, and logprobs."""
    mask = np.zeros(4, dtype=np.int32)

    assert len(UNREAD) == 9
    assert not may_be_unread(SampleRow(params(logprobs=0), 0))
    assert not may_be_unread(SampleRow(params(), 0, forbid=(2,)))
    assert not may_be_unread(SampleRow(params(), 0, allowed=mask))
    assert not may_be_unread(SampleRow(params(), 0, fault="it cannot be followed"))
