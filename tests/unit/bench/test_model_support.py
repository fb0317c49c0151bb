"""The table of model types is what the installed library and this code give today, for a sample of every kind."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.model_support.group_trial import try_in_group
from bench.model_support.rope_trials import ROPE_TRIALS
from bench.model_support.sweep import bounded
from bench.model_support.trial import Outcome, try_configs, try_type
from bench.model_support.types import swept, with_text_part
from bench.results_file import RESULTS
from services.worker.engine.text_parts import PROVEN

SAMPLE = ("nemotron", "qwen3_moe", "llava", "deepseek_v3", "falcon", "mamba", "bart")
"""Families that ``tests/checkpoints.py`` has are proved by many other tests."""

IN_GROUPS = ("deepseek_v2", "kimi_linear", "olmo2", "mamba2")
"""Of types that one rank serves, two that two ranks serve, and two that they refuse."""

SAMPLE_ROPE = ("longrope, long factors", "dynamic", "proportional")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


UNTRIED_LATER = {"llama4"}
"""The whole model answered as its text part with Transformers 5.23; that of 5.24 runs no text without a picture."""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The committed sweep."""
    document = json.loads((RESULTS / "model_support.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["results"]
    return found


def test_every_type_of_the_library_has_a_row(results: dict[str, Any]) -> None:
    """After an update of transformers, ``python -m bench.model_support`` must be run and its result committed."""
    assert sorted(results["types"]) == swept()
    assert results["with_text_part"] == with_text_part()
    assert set(results["rope"]) == set(ROPE_TRIALS)


def test_no_type_crashes_or_answers_otherwise(results: dict[str, Any]) -> None:
    """Each is served, refused, or could not be tried, and what is not served has a reason."""
    rows = {**results["types"], **results["rope"]}

    assert {row["outcome"] for row in rows.values()} <= {"served", "refused", "untried"}
    assert [name for name, row in rows.items() if row["outcome"] != "served" and not row.get("reason")] == []


def test_text_parts_are_used_where_the_sweep_proved_them(results: dict[str, Any]) -> None:
    """No type is taken to be exact that was not compared, here or with an earlier library that ran the whole model."""
    rows = {name: results["types"][name]["outcome"] for name in with_text_part()}

    assert {name for name, outcome in rows.items() if outcome == "served"} <= PROVEN
    assert {name for name in PROVEN if rows[name] != "served"} <= UNTRIED_LATER
    assert {rows[name] for name in UNTRIED_LATER} <= {"served", "untried"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_comes_out_as_it_was_recorded(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    """Tried anew, a type has the outcome and the reason of its row."""
    row = results["types"][name]

    found = try_type(name, tmp_path, seed=0)

    assert found == Outcome(row["outcome"], row.get("reason", ""))


@pytest.fixture(scope="module")
def group_results() -> dict[str, Any]:
    """The committed sweep in groups of two ranks."""
    document = json.loads((RESULTS / "group_support.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["results"]
    return found


def test_groups_have_a_row_for_every_type_that_one_rank_serves(
    results: dict[str, Any], group_results: dict[str, Any]
) -> None:
    """Text parts, which are types of their own, aside; and none crashes or answers otherwise."""
    served = {name for name, row in results["types"].items() if row["outcome"] == "served"}
    rows = group_results["types"]

    assert set(rows) == served - set(with_text_part())
    assert {row["outcome"] for row in rows.values()} <= {"served", "refused", "untried"}
    assert [name for name, row in rows.items() if row["outcome"] != "served" and not row.get("reason")] == []


@pytest.mark.parametrize("name", IN_GROUPS)
def test_a_sample_of_groups_too(name: str, group_results: dict[str, Any]) -> None:
    """Tried anew with real ranks, in copies of this process."""
    row = group_results["types"][name]

    found = bounded(partial(_in_group, name), cpu_s=60)

    assert found == Outcome(row["outcome"], row.get("reason", ""))


def _in_group(name: str, folder: Path) -> Outcome:
    return try_in_group(name, 2, folder, seed=0)


@pytest.mark.parametrize("name", SAMPLE_ROPE)
def test_a_sample_of_rotary_embeddings_too(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    """Rows of the second table are tried anew as well."""
    row = results["rope"][name]

    assert ROPE_TRIALS[name](tmp_path) == Outcome(row["outcome"], row.get("reason", ""))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": False}, "its attention is not causal"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantised with GPTQ"),
    ],
    ids=["bidirectional", "quantised"],
)
def test_refusals_are_rows_too(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """A configuration that is refused comes out as refused, with the reason, and not as a crash."""
    found = try_configs(
        iter([LlamaConfig(vocab_size=300, hidden_size=32, num_attention_heads=2, **changes)]), tmp_path, 0
    )

    assert found.outcome == "refused"
    assert reason in found.reason


def test_a_trial_that_dies_or_never_ends_is_an_outcome(tmp_path: Path) -> None:
    """A killed process is a crash, an exception one that is named, and one without end is ended."""

    def spin(folder: Path) -> Outcome:
        while True:
            pass

    def die(folder: Path) -> Outcome:
        os._exit(3)

    def fail(folder: Path) -> Outcome:
        raise TypeError("odd")

    assert bounded(lambda folder: Outcome("served"), cpu_s=60) == Outcome("served")
    assert bounded(die, cpu_s=60).outcome == "crashed"
    assert bounded(fail, cpu_s=60) == Outcome("crashed", "TypeError: odd")
    assert bounded(spin, cpu_s=1).outcome == "untried"
