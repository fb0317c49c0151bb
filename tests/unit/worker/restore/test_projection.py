"""KV restored from hidden states is the KV that was computed, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.engine.forward_meta import Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.kv_slots import KvSlots
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.errors import UnsupportedModel
from tests.engine_driver import Request, page_tables, random_prompt
from tests.unit.worker.restore.saved import CPU, FAMILIES, kv_of, saving

LoadRunner = Callable[..., ModelRunner]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_restored_kv_is_the_kv_that_was_computed(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Equal to the bit, prefilled or decoded, from any position on: a row's result does not depend on its batch."""
    runner = load_runner(family, dtype=dtype)
    (table,) = page_tables(runner, [90], seed=3)
    request = Request(random_prompt(70, seed=4), table)
    with saving(runner) as saved:
        saved.saver.begin("r", 0)
        saved.run("r", request, [33, 37], new_tokens=18)
        saved.saver.end("r")
    expected, first, end = kv_of(runner, table, request.computed), 21, request.computed
    projection = KvProjection(runner)
    runner.pool.tensor[:, :, torch.from_numpy(table[2:]).long()] = float("nan")
    segment = Segment(end - first, first, table)
    slots = KvSlots.of_segment(segment, 16, CPU)
    embeddings = projection.position_embeddings(torch.arange(first, end))

    for layer in range(runner.geometry.layers):
        rows = torch.cat(
            [torch.from_numpy(piece.layer_rows(layer)).view(runner.pool.tensor.dtype) for piece in saved.shelf.pieces]
        )
        projection.restore(layer, rows[first:end], embeddings, slots)

    restored = kv_of(runner, table, end)
    assert torch.equal(restored, expected)


def test_long_runs_are_projected_in_blocks(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks leave no row out and give each its own position."""
    runner = load_runner("llama")
    projection = KvProjection(runner)
    tables = page_tables(runner, [100, 100], seed=5)
    hidden = torch.randn(100, 64, generator=torch.Generator().manual_seed(6))
    results = []
    for table, block in zip(tables, (1000, 7), strict=True):
        monkeypatch.setattr("services.worker.restore.projection.BLOCK_ROWS", block)
        slots = KvSlots.of_segment(Segment(100, 0, table), 16, CPU)
        projection.restore(1, hidden, projection.position_embeddings(torch.arange(100)), slots)
        results.append(kv_of(runner, table, 100)[1])

    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_modules_stay_as_they_are(family: str, load_runner: LoadRunner) -> None:
    """Queries are left out of a second face of each module; the module that serves keeps its own."""
    runner = load_runner(family)
    before = [module.q_proj for module in KvProjection(runner).inputs.modules]

    projection = KvProjection(runner)

    assert all(module.q_proj is q_proj for module, q_proj in zip(projection.inputs.modules, before, strict=True))


def _knows_the_batch(module: Any) -> None:
    plain = module.k_proj.forward
    calls = iter(range(1, 1000))
    module.k_proj.forward = lambda x: plain(x) * next(calls)


def _takes_more(module: Any) -> None:
    plain = module.forward

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> object:
        kwargs.pop("embeddings_of_the_first_layer", None)
        return plain(hidden_states, **kwargs)

    def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "embeddings_of_the_first_layer": torch.zeros(1)}

    module.forward = forward
    module.register_forward_pre_hook(add, with_kwargs=True)


def _has_no_way_to_call_it(module: Any) -> None:
    plain = module.forward
    given: list[object] = []

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> object:
        given.append(kwargs["position_ids"])
        return plain(hidden_states, **kwargs)

    module.forward = forward


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_knows_the_batch, "K of layer 1 .* does not follow from its hidden states"),
        (_takes_more, "takes embeddings_of_the_first_layer"),
        (_has_no_way_to_call_it, "cannot be called by themselves"),
    ],
)
def test_a_model_whose_kv_needs_more_is_refused(
    spoil: Callable[[torch.nn.Module], None], reason: str, load_runner: LoadRunner
) -> None:
    """The refusal is a typed one that says why; the model serves all the same."""
    runner = load_runner("llama", forward="portable")  # What is no Llama any more is computed by its own modules.
    spoil(KvProjection(runner).inputs.modules[1])

    with pytest.raises(HiddenStatesUnsupported, match=reason) as refused:
        KvProjection(runner)

    assert isinstance(refused.value, UnsupportedModel)
    assert refused.value.code == "hidden_states_unsupported"
