"""A pass through the first layers writes their KV and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.worker.engine.forward_meta import Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.first_layers import compute_first_layers
from shared.errors import InvariantViolated
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.unit.worker.restore.saved import FAMILIES, kv_of

LoadRunner = Callable[..., ModelRunner]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_these_layers_are_computed(family: str, load_runner: LoadRunner) -> None:
    """After context, for every number of layers: their KV equals that of a whole pass, the others are untouched."""
    runner = load_runner(family)
    layers = runner.geometry.layers
    (table,) = page_tables(runner, [60], seed=1)
    prompt = random_prompt(60, seed=2)
    run_step(runner, [(Request(prompt, table), 60)])
    expected = kv_of(runner, table, 60)
    pages = torch.from_numpy(table[1:]).long()

    for count in range(layers + 1):
        runner.pool.tensor[:, :, pages] = -1.0
        compute_first_layers(runner, torch.tensor(prompt[16:]), Segment(44, 16, table), count)

        found = kv_of(runner, table, 60)
        torch.testing.assert_close(found[:count], expected[:count], atol=1e-5, rtol=1e-4)
        assert (found[count:, :, 16:] == -1.0).all()


def test_the_model_goes_on_as_before(load_runner: LoadRunner) -> None:
    """A pass that ended early leaves nothing behind in the model."""
    runner = load_runner("gemma2")
    tables = page_tables(runner, [30, 30], seed=3)
    prompt = random_prompt(30, seed=4)
    expected = run_step(runner, [(Request(prompt, tables[0]), 30)])

    compute_first_layers(runner, torch.tensor(prompt), Segment(30, 0, tables[1]), 2)

    assert torch.equal(run_step(runner, [(Request(prompt, tables[0]), 30)]), expected)


def test_tokens_and_rows_must_agree(load_runner: LoadRunner) -> None:
    """Too few ids, or more layers than there are, are the caller's mistake."""
    runner = load_runner("llama")
    (table,) = page_tables(runner, [30], seed=3)

    for count, layers in ((29, 1), (30, 4)):
        with pytest.raises(InvariantViolated):
            compute_first_layers(runner, torch.zeros(count, dtype=torch.int64), Segment(30, 0, table), layers)
