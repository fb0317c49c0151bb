"""What the last layer leaves out: rows of which nobody wants logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.fused.last_layer import last_layer
from services.worker.engine.model_runner import ModelRunner
from tests.checkpoints import SLIDING_WINDOW
from tests.engine_driver import Request, page_tables, random_prompt, run_step

LoadRunner = Callable[..., ModelRunner]
TABLE = np.arange(8, dtype=np.int32)


def step(*segments: tuple[int, int]) -> ForwardMeta:
    """A step of segments (rows, context)."""
    return ForwardMeta.build([Segment(rows, context, TABLE) for rows, context in segments], 16, "cpu")


def test_a_segment_is_reduced_by_what_is_wanted_of_it_alone() -> None:
    """To its last row, to nothing, or not at all; wanted rows may come in any order and more than once."""
    left = last_layer(step((4, 3), (1, 20), (5, 0), (3, 7)), torch.tensor([12, 3, 4, 10, 3]))

    assert left is not None
    assert left.rows.tolist() == [3, 4, 10, 11, 12]
    assert left.rows[left.last_rows].tolist() == [12, 3, 4, 10, 3]
    assert left.meta is not None
    assert [(each.rows, each.context) for each in left.meta.segments] == [(1, 6), (1, 20), (3, 7)]


def test_nothing_is_left_of_a_chunk_in_the_middle_of_a_prompt() -> None:
    """Its keys and values are all that it is computed for."""
    left = last_layer(step((4, 3), (5, 0)), torch.empty(0, dtype=torch.int64))

    assert left is not None
    assert left.meta is None
    assert len(left.rows) == len(left.last_rows) == 0


@pytest.mark.parametrize(
    ("segments", "wanted"),
    [([(1, 5), (1, 9)], [0, 1]), ([(1, 5), (1, 9)], []), ([(3, 5)], [0, 1, 2]), ([(3, 5), (1, 2)], [3, 1])],
)
def test_a_step_that_is_wanted_whole_is_left_alone(segments: list[tuple[int, int]], wanted: list[int]) -> None:
    """So is one of single rows, which nothing can be taken from that would pay."""
    assert last_layer(step(*segments), torch.tensor(wanted, dtype=torch.int64)) is None


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_the_last_row_alone_is_what_it_is_among_all(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Up to rounding, behind context and windows; what is in the pool is the same to the bit."""
    runner = load_runner(family, dtype=dtype, forward="fused")
    length = 2 * SLIDING_WINDOW + 45
    (table,) = page_tables(runner, [length], seed=1)
    prompt = random_prompt(length, seed=2)
    found = []
    for wanted in (torch.arange(40), torch.tensor([39])):
        runner.pool.tensor.zero_()
        run_step(runner, [(Request(prompt[: length - 40], table), length - 40)])
        meta = ForwardMeta.build([Segment(40, length - 40, table)], 16, "cpu")
        logits = runner.forward(torch.tensor(prompt[-40:]), torch.arange(length - 40, length), meta, wanted)
        found.append((logits[-1], runner.pool.tensor.clone()))

    (among, pool), (alone, same_pool) = found
    assert torch.equal(pool, same_pool)
    deviation = (alone - among).square().mean().sqrt() / among.std()
    assert deviation < {"float32": 1e-5, "bfloat16": 0.03}[dtype]


@needs_compiler
def test_every_layer_is_waited_for_also_where_nothing_is_left_of_the_last(load_runner: LoadRunner) -> None:
    """A load of the last layer that fails must end the step, whoever wants its logits."""
    runner = load_runner("llama", forward="fused")
    (table,) = page_tables(runner, [40], seed=3)
    waited: list[int] = []

    class Gate:
        def wait(self, layer: int) -> None:
            waited.append(layer)

    meta = ForwardMeta.build([Segment(20, 0, table)], 16, "cpu", gate=Gate())
    for wanted in ([], [19], [3, 19]):
        logits = runner.forward(
            torch.tensor(random_prompt(20, seed=3)), torch.arange(20), meta, torch.tensor(wanted, dtype=torch.int64)
        )
        assert len(logits) == len(wanted)

    assert waited == [0, 1, 2] * 3
