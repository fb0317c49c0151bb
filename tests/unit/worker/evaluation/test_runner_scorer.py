"""Scores of a real model, against every answer computed by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.stored_prefix import StoredPrefix
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.evaluation import runner_scorer
from services.worker.evaluation.methods import Full, Method, MethodSettings
from services.worker.evaluation.packed_questions import Asked
from services.worker.evaluation.recomputing_scorer import RecomputingScorer
from services.worker.evaluation.runner_scorer import RunnerScorer
from services.worker.evaluation.scorer import QuestionScore
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.selection import Budget
from shared.errors import ConfigError, ContextTooLong, UnsupportedModel
from shared.importance import PROBE_HEADS
from tests.checkpoints import FAMILIES
from tests.engine_driver import random_prompt
from tests.unit.worker.runners import LoadRunner

PREFIX = random_prompt(75, 3)
ASKED = tuple(
    Asked(
        tuple(random_prompt(5 + number, 10 + number)),
        tuple(tuple(random_prompt(1 + answer, 20 * number + answer)) for answer in range(3)),
    )
    for number in range(4)
)


def likelihoods(scores: list[QuestionScore]) -> list[float]:
    return [answer.log_probability for score in scores for answer in score.answers]


@pytest.mark.parametrize("family", [*FAMILIES, "llama_mha"])
def test_the_whole_prefix_gives_what_recomputation_gives(family: str, load_runner: LoadRunner) -> None:
    """Packing, the shared prefix, windows and soft caps change no probability and no greedy answer."""
    runner = load_runner(family)

    expected = RecomputingScorer(runner).score(PREFIX, ASKED)
    found = RunnerScorer(runner).score(PREFIX, ASKED, Full())

    assert likelihoods(found) == pytest.approx(likelihoods(expected), abs=1e-3)
    assert [[one.is_greedy for one in score.answers] for score in found] == [
        [one.is_greedy for one in score.answers] for score in expected
    ]


def test_the_score_is_the_sum_that_the_model_itself_gives(
    checkpoint_of: Callable[[str], Path], load_runner: LoadRunner
) -> None:
    """Hugging Face's own forward pass over prefix, question and answer, its log-probabilities added by hand."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"), dtype=torch.float32).eval()

    expected = []
    for one in ASKED:
        for answer in one.answers:
            ids = [*PREFIX, *one.question, *answer]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            total = 0.0
            for place in range(len(ids) - len(answer), len(ids)):
                total += float(torch.log_softmax(logits[place - 1].double(), dim=-1)[ids[place]])
            expected.append(total)

    assert likelihoods(RunnerScorer(load_runner("llama")).score(PREFIX, ASKED, Full())) == pytest.approx(
        expected, abs=1e-3
    )


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in ("importance", "h2o", "static", "random", "recent")), ("importance", "gemma2")],
)
def test_a_ratio_of_one_is_the_whole_prefix(name: str, family: str, load_runner: LoadRunner) -> None:
    """Every method that may keep everything does, and then nothing is lost."""
    scorer, method = RunnerScorer(load_runner(family)), Method.named(name)
    recorder = method.recorder()

    whole = scorer.score(PREFIX, ASKED, recorder)
    found = scorer.score(PREFIX, ASKED, method.at(1.0, MethodSettings(), recorder))

    assert likelihoods(found) == pytest.approx(likelihoods(whole), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "metric"),
    [
        *((family, "h2o") for family in ("agreeing", "llama", "mistral", "gemma2", "qwen3")),
        ("llama", "last"),
        ("llama", "max_pooled"),
    ],
)
def test_what_is_evaluated_is_what_is_served(family: str, metric: str, load_runner: LoadRunner) -> None:
    """The worker's own step over important tokens gives every answer the same probability."""
    runner = load_runner(family)
    found = RunnerScorer(runner).score(PREFIX, ASKED, Method.named(f"importance:{metric}").at(0.25, MethodSettings()))

    expected = [_served(runner, one, answer, metric) for one in ASKED for answer in one.answers]

    assert likelihoods(found) == pytest.approx(expected, abs=1e-3)


def _served(runner: ModelRunner, one: Asked, answer: tuple[int, ...], metric: str) -> float:
    """The question in a first step, which chooses, and the answer in a second. The prefix lies in the pool's first
    pages, where the scorer computed it; the request has its own behind them.
    """
    pages = torch.arange(runner.pool.pages, dtype=torch.int32).numpy()
    kv = runner.pool.tensor.flatten(2, 3)[:, :, : len(PREFIX)].clone()
    stored = StoredPrefix(kv, range(min(PROBE_HEADS, kv.shape[3])))
    prefix = ImportantPrefix(stored, LoadingRule(Budget(0.25), metric), runner.geometry.layers)
    logits, at = [], len(PREFIX)
    # The last page of the prefix has room for the request's first tokens; other questions overwrite them only later.
    for ids in (one.question, answer):
        meta = ForwardMeta.build([Segment(len(ids), at, pages)], runner.geometry.page_size, "cpu")
        step = ImportanceStep(meta, runner.pool, CpuAttention(runner.pool), {0: prefix})
        positions = torch.arange(at, at + len(ids))
        logits.append(runner.run(torch.tensor(ids), positions, step, torch.arange(len(ids))))
        at += len(ids)
    predicting = torch.cat([logits[0][-1:], logits[1][:-1]])
    return float(torch.log_softmax(predicting, dim=-1).gather(1, torch.tensor(answer)[:, None]).sum())


def test_less_of_the_prefix_changes_answers(load_runner: LoadRunner) -> None:
    """The selection is attended to and nothing else: a tenth of the prefix is not the whole of it."""
    scorer = RunnerScorer(load_runner("llama"))

    whole = scorer.score(PREFIX, ASKED, Full())
    part = scorer.score(PREFIX, ASKED, Method.named("recent").at(0.1, MethodSettings()))

    assert max(abs(a - b) for a, b in zip(likelihoods(whole), likelihoods(part), strict=True)) > 0.01
    assert [one.read for one in part] == pytest.approx([8 / 75] * 4)


def test_layers_with_sinks_are_not_scored(load_runner: LoadRunner) -> None:
    """Methods that choose tokens know nothing of them."""
    scorer = RunnerScorer(load_runner("gpt_oss"))

    with pytest.raises(UnsupportedModel, match="not measured with attention sinks or chunks"):
        scorer.score(PREFIX, ASKED, Full())


def test_scores_do_not_depend_on_the_batch(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question at a time scores as all at once, random tokens included, and again as before."""
    runner = load_runner("llama")
    random = Method.named("random").at(0.3, MethodSettings())
    together = RunnerScorer(runner).score(PREFIX, ASKED, random)
    again = RunnerScorer(runner).score(PREFIX, ASKED, random)

    monkeypatch.setattr(runner_scorer, "BATCH_WEIGHTS", 1)
    single = RunnerScorer(runner).score(PREFIX, ASKED, random)

    assert likelihoods(again) == likelihoods(together)
    assert likelihoods(single) == pytest.approx(likelihoods(together), abs=1e-4)


def test_a_prefix_is_computed_once(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later questions about it find its KV in the pool; another prefix replaces it."""
    runner = load_runner("llama")
    computed: list[int] = []
    forward = runner.forward

    def counting(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        computed.append(len(ids))
        return forward(ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "forward", counting)
    scorer = RunnerScorer(runner)
    for prefix in (PREFIX, PREFIX, PREFIX[:50], PREFIX):
        scorer.score(prefix, ASKED, Full())

    assert computed == [75, 50, 75]


def test_a_long_prefix_goes_in_chunks(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size give the same KV."""
    runner = load_runner("llama")
    expected = RunnerScorer(runner).score(PREFIX, ASKED, Full())

    monkeypatch.setattr(runner_scorer, "PREFIX_CHUNK", 20)

    assert likelihoods(RunnerScorer(runner).score(PREFIX, ASKED, Full())) == pytest.approx(
        likelihoods(expected), abs=1e-4
    )


def test_what_does_not_fit_is_refused(load_runner: LoadRunner) -> None:
    """Too long for the model, too long for the pool, or nothing at all: each says so."""
    scorer = RunnerScorer(load_runner("llama", tokens=128))

    with pytest.raises(ContextTooLong, match="2048"):
        scorer.score([1] * 2047, ASKED, Full())
    with pytest.raises(ConfigError, match="does not hold 200 tokens"):
        scorer.score([1] * 200, ASKED, Full())
    with pytest.raises(ConfigError, match="a token at least"):
        scorer.score([], ASKED, Full())
