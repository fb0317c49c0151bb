"""The input of attention is seen when asked for, and only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.refusals import HiddenStatesUnsupported
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.unit.worker.restore.saved import FAMILIES

LoadRunner = Callable[..., ModelRunner]


class _Seen:
    def __init__(self) -> None:
        self.layers: list[int] = []
        self.hidden: list[torch.Tensor] = []

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        self.layers.append(layer)
        self.hidden.append(hidden.clone())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_gives_its_input(family: str, load_runner: LoadRunner) -> None:
    """Each layer gives [rows, hidden] once, in order, and the step computes what it computes unseen."""
    runner = load_runner(family)
    (table,) = page_tables(runner, [20], seed=1)
    expected = run_step(runner, [(Request(random_prompt(20, seed=2), table), 20)])
    seen = _Seen()

    with AttentionInputs(runner.model, runner.geometry.layers).given_to(seen):
        logits = run_step(runner, [(Request(random_prompt(20, seed=2), table), 20)])

    assert torch.equal(logits, expected)
    assert seen.layers == list(range(runner.geometry.layers))
    assert {each.shape for each in seen.hidden} == {(20, runner.model.config.hidden_size)}


def test_outside_the_block_no_hook_is_left(load_runner: LoadRunner) -> None:
    """Within the block the chosen layers have hooks; outside none has, even if the step raised."""
    runner, seen = load_runner("llama"), _Seen()
    inputs = AttentionInputs(runner.model, runner.geometry.layers)

    def hooks() -> list[int]:
        return [len(module._forward_pre_hooks) for module in inputs.modules]

    def fail() -> None:
        with inputs.given_to(seen, layers=[1]):
            assert hooks() == [0, 1, 0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert hooks() == [0, 0, 0]


def test_a_model_without_one_attention_module_a_layer_is_refused(load_runner: LoadRunner) -> None:
    """A layer without an attention module, or with two, is said."""
    runner = load_runner("llama")

    with pytest.raises(HiddenStatesUnsupported, match="has 4 layers"):
        AttentionInputs(runner.model, 4)
