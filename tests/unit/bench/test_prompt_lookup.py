"""The benchmark of prompt lookup on a tiny model: what is said are the texts, whatever is proposed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import prompt_lookup
from bench.prompt_lookup import Workload, compare, loaded, row_costs, run
from services.worker.detokenizer import Vocabulary
from tests.checkpoints import make_checkpoint

COPIED = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_texts_are_said_and_copies_take_fewer_steps(model: Path) -> None:
    """Requests say their own text, in as few steps as they copy."""
    copying = Workload("copy", [COPIED, COPIED[3:]], [COPIED, COPIED[3:]])
    with loaded(model, 1) as runner:
        words = Vocabulary.from_directory(model)
        found = compare(runner, words, copying, requests=2, rounds=2)
        alone = run(runner, words, copying, 1, 0)

    assert alone.tokens == [COPIED]
    assert alone.steps == len(COPIED) - 1
    assert found["answer_tokens"] == len(COPIED) + len(COPIED[3:])
    assert found["steps"] < alone.steps / 2
    assert found["accepted"] <= found["proposed"]
    assert found["speedup_min_max"][0] <= found["speedup"] <= found["speedup_min_max"][1]


def test_other_tokens_end_the_benchmark(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference between the two is no figure but an error."""
    copying = Workload("copy", [COPIED], [COPIED])
    tokens = iter([[[1]], [[1]], [[2]]])
    with loaded(model, 1) as runner:
        words = Vocabulary.from_directory(model)
        real = run(runner, words, copying, 1, 0)
        monkeypatch.setattr(
            prompt_lookup, "run", lambda *_, **__: prompt_lookup.Run(next(tokens), 1.0, 1.0, 1.0, real.steps, 0, 0)
        )
        with pytest.raises(RuntimeError, match="copy: tokens differ"):
            compare(runner, words, copying, requests=1, rounds=1)


def test_rows_are_measured_behind_each_context(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows has a median behind each context."""
    monkeypatch.setattr(prompt_lookup, "CONTEXTS", (10, 100))
    with loaded(model, 1) as runner:
        found = row_costs(runner, rounds=2)

    assert [each["context"] for each in found] == [10, 100]
    assert all(list(each["ms"]) == [str(rows) for rows in prompt_lookup.ROWS] for each in found)
    assert all(ms > 0 for each in found for ms in each["ms"].values())


def test_texts_are_the_repository_s_own() -> None:
    """Every prompt and answer is there, and as long as it is asked for."""
    made = prompt_lookup.workloads(3)

    assert [each.name for each in made] == ["edit", "quotes", "prose", "random"]
    for each in made:
        assert each.answers is not None
        assert {len(prompt) for prompt in each.prompts} == {prompt_lookup.PROMPT}
        assert {len(answer) for answer in each.answers} == {prompt_lookup.ANSWER}
