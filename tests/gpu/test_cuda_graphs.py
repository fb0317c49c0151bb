"""Captured decode steps on a GPU give the logits of steps that are launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from tests.checkpoints import UNLIKE, make_checkpoint
from tests.engine_driver import page_tables, random_prompt
from tests.run_name import shm_prefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MOST_ROWS = 64
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean deviation relative to the spread of a row: padding may have a product computed by another kernel."""


@pytest.fixture(
    params=[
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma2", "bfloat16"),
        ("qwen3", "bfloat16"),
        *((family, "float32") for family in UNLIKE),
    ]
)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelRunner]:
    family, dtype = request.param
    made = ModelRunner.load(
        make_checkpoint(family, tmp_path), dtype=dtype, device="cuda", page_size=16, device_kv_bytes=None,
        pages=512, threads=0, shm_prefix=shm_prefix("graphs"),
    )  # fmt: skip
    try:
        made.warm_up()
        made.capture_decode(MOST_ROWS)
        yield made
    finally:
        made.close()


def prefill(runner: ModelRunner, length: int, table: np.ndarray, seed: int) -> None:
    if length:
        meta = ForwardMeta.build([Segment(length, 0, table)], 16, "cuda")
        prompt = torch.tensor(random_prompt(length, seed=seed))
        runner.forward(prompt, torch.arange(length), meta, torch.empty(0, dtype=torch.int64))


def decode_meta(lengths: list[int], tables: list[np.ndarray]) -> ForwardMeta:
    segments = [Segment(1, length, table) for length, table in zip(lengths, tables, strict=True)]
    return ForwardMeta.build(segments, 16, "cuda")


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    spread = expected.std(dim=-1, keepdim=True).clamp_min(1e-12)
    return float(((found - expected) / spread).square().mean(dim=-1).sqrt().mean())


def test_every_size_of_batch_gives_the_logits_of_an_ordinary_step(runner: ModelRunner) -> None:
    """Sizes that have a graph, and those between them, which are padded; the pool is written where it should be."""
    graphs = runner._graphs
    assert graphs is not None
    assert {shape.rows for shape in graphs.shapes} == {1, 2, 4, 8, 16, 24, 32, 48, 64}
    dtype = str(runner.pool.tensor.dtype).removeprefix("torch.")
    for rows in range(1, MOST_ROWS + 1):
        lengths = [(37 * row + rows) % 90 for row in range(rows)]
        tables = page_tables(runner, [length + 1 for length in lengths], seed=rows)
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            prefill(runner, length, table, seed=row)
        ids, positions = torch.tensor(random_prompt(rows, seed=rows)), torch.tensor(lengths)
        meta, last_rows = decode_meta(lengths, tables), torch.arange(rows)
        assert graphs.shape_for(meta, last_rows) is not None
        expected = runner.run(ids, positions, runner.paged_step(meta), last_rows)
        written = runner.pool.tensor.clone()
        slots = meta.slots.cpu()
        for slot in slots.tolist():
            runner.pool.tensor[:, :, slot // 16, slot % 16] = 0

        found = runner.forward(ids, positions, meta, last_rows)

        assert deviation(found, expected) <= TOLERANCE[dtype], rows
        torch.testing.assert_close(runner.pool.tensor, written, atol=0.05, rtol=0.05)


def test_greedy_tokens_are_those_of_ordinary_steps(runner: ModelRunner) -> None:
    """Of three requests that decode together for forty steps, one of them across a length at which the grid grows."""
    lengths = [3, 70, 490]
    tables = page_tables(runner, [length + 60 for length in lengths], seed=1)

    def decode(step: Callable[..., torch.Tensor]) -> list[list[int]]:
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            prefill(runner, length, table, seed=row)
        ids, answers = torch.tensor([7, 8, 9]), []
        for number in range(40):
            now = [length + number for length in lengths]
            ids = step(ids, torch.tensor(now), decode_meta(now, tables), torch.arange(3)).argmax(-1).cpu()
            answers.append(ids.tolist())
        return answers

    def eager(ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor) -> torch.Tensor:
        return runner.run(ids, positions, runner.paged_step(meta), last_rows)

    if runner.pool.tensor.dtype != torch.float32:
        pytest.skip("in half precision two equally likely tokens may change places")
    assert decode(runner.forward) == decode(eager)


def test_a_longer_step_goes_to_a_larger_grid(runner: ModelRunner) -> None:
    """Past 512 tokens another graph serves, and gives an ordinary step's logits."""
    length = min(1000, runner.max_context - 1)
    (table,) = page_tables(runner, [length + 1], seed=3)
    prefill(runner, length, table, seed=4)
    ids, positions, last_rows = torch.tensor([11]), torch.tensor([length]), torch.tensor([0])
    meta = decode_meta([length], [table])
    expected = runner.run(ids, positions, runner.paged_step(meta), last_rows)

    found = runner.forward(ids, positions, meta, last_rows)

    dtype = str(runner.pool.tensor.dtype).removeprefix("torch.")
    assert deviation(found, expected) <= TOLERANCE[dtype]


def test_graphs_take_bounded_memory(tmp_path: Path) -> None:
    """Those of 64 rows take less than the bound beside the pool."""
    made = ModelRunner.load(
        make_checkpoint("llama", tmp_path), dtype="bfloat16", device="cuda", page_size=16, device_kv_bytes=None,
        pages=512, threads=0, shm_prefix=shm_prefix("graphs"),
    )  # fmt: skip
    try:
        made.warm_up()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        made.capture_decode(MOST_ROWS)
        assert before - torch.cuda.mem_get_info()[0] < 2 * 2**30
    finally:
        made.close()
