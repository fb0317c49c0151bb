"""A worker knows at its start whether it can read parts of prefixes, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.identification import SINKS_OR_CHUNKS
from services.worker.importance.obstacles import obstacle_to_parts
from services.worker.parallel.group_runner import GroupRunner
from tests.unit.worker.runners import LoadRunner

BUFFER_BYTES = 2**20


@pytest.mark.parametrize("family", ["llama_mha", "llama", "mistral", "gemma2", "opt"])
def test_models_with_nothing_but_k_and_v_are_read_in_part(family: str, load_runner: LoadRunner) -> None:
    """Windows and soft caps are no obstacles."""
    assert obstacle_to_parts(load_runner(family), BUFFER_BYTES) == ""


@pytest.mark.parametrize(
    ("family", "obstacle"),
    [
        ("gpt_oss", SINKS_OR_CHUNKS),
        ("llama4", SINKS_OR_CHUNKS),
        ("mla", "pages hold latents"),
        ("mimo", "pages hold K and V"),
        ("bloom", "the model attends by code of its own"),
    ],
)
def test_other_models_say_what_they_have(family: str, obstacle: str, load_runner: LoadRunner) -> None:
    """The first obstacle is named."""
    assert obstacle_to_parts(load_runner(family), BUFFER_BYTES).startswith(obstacle)


def test_settings_are_obstacles(load_runner: LoadRunner) -> None:
    """No memory for reads, and KV in eight bits."""
    assert obstacle_to_parts(load_runner("llama"), 0) == "--sparse-buffer-bytes is 0"
    assert "eight bits" in obstacle_to_parts(load_runner("llama", kv_dtype="fp8"), BUFFER_BYTES)


@pytest.mark.parametrize(
    ("family", "obstacle"), [("llama_mha", ""), ("gpt_oss", SINKS_OR_CHUNKS), ("llama4", SINKS_OR_CHUNKS)]
)
def test_a_group_says_the_same_without_a_pass(family: str, obstacle: str, load_runner: LoadRunner) -> None:
    """Which would need the other ranks."""
    group = _Group(load_runner(family))

    assert obstacle_to_parts(group, BUFFER_BYTES) == obstacle


class _Group(GroupRunner):
    """Rank 0's share is the whole model here."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: Any = runner
        self.pool = runner.pool
