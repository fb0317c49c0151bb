"""The attention kernels against their oracle, in Triton's interpreter (fp32 and fp16; bf16 needs a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.worker.engine.key_splits import MAX_SPLITS, SPLIT_KEYS
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.interpreted import Interpreter
from tests.unit.worker.kernels.paged_batches import Batch, Shape, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def _settings(head_dim: int, **change: Any) -> dict[str, Any]:
    return {"scaling": head_dim**-0.5, "window": None, "softcap": None} | change


def _run(interpreter: Interpreter, batch: Batch, settings: dict[str, Any]) -> torch.Tensor:
    return interpreter.paged_attention(batch.tensors, batch.tables, settings)


def _assert_equal_to_oracle(interpreter: Interpreter, shape: Shape, **change: Any) -> None:
    batch, settings = make_batch(shape), _settings(shape.head_dim, **change)

    actual = _run(interpreter, batch, settings)

    expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)
    assert actual.dtype == shape.dtype
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])


BATCHES = {
    "decode": ((1, 0), (1, 15), (1, 16), (1, 70)),
    "prompt": ((5, 0), (33, 0)),
    "extend": ((40, 23), (2, 64)),
    "mixed": ((1, 40), (19, 5), (1, 3), (70, 0), (1, 0)),
}

BOUNDED = {name: segments for name, segments in BATCHES.items() if name != "prompt"}
"""What is bounded row by row: a whole prompt is among the mixed ones."""


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_every_mixture_of_rows_and_page_sizes(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], page_size: int
) -> None:
    """Decode rows, whole prompts and later chunks in one batch equal the oracle at every page size."""
    _assert_equal_to_oracle(interpreter, Shape(segments, page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_every_head_dim(interpreter: Interpreter, head_dim: int, dtype: torch.dtype) -> None:
    """Head dimensions up to 256, powers of two or not, in fp32 and fp16."""
    _assert_equal_to_oracle(interpreter, Shape(((1, 37), (20, 9)), head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (24, 1), (72, 1)])
def test_every_grouping_of_heads(interpreter: Interpreter, heads: int, kv_heads: int) -> None:
    """MHA, GQA and MQA, with groups that are powers of two, that are not, and that are larger than a tile."""
    _assert_equal_to_oracle(interpreter, Shape(((1, 20), (9, 11)), heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("window", [1, 7, 33, 10_000])
@pytest.mark.parametrize("segments", BOUNDED.values(), ids=BOUNDED)
def test_sliding_windows(interpreter: Interpreter, segments: tuple[tuple[int, int], ...], window: int) -> None:
    """A row sees its last ``window`` keys, itself included, whether shorter or longer than context and tile."""
    _assert_equal_to_oracle(interpreter, Shape(segments), window=window)


@pytest.mark.parametrize("segments", BOUNDED.values(), ids=BOUNDED)
def test_soft_caps(interpreter: Interpreter, segments: tuple[tuple[int, int], ...]) -> None:
    """Scores are capped smoothly, alone and together with a window and another scaling."""
    _assert_equal_to_oracle(interpreter, Shape(segments), softcap=0.7)
    _assert_equal_to_oracle(interpreter, Shape(segments), softcap=50.0, window=9, scaling=1.0)


@pytest.mark.parametrize("chunk", [1, 7, 33, 10_000])
@pytest.mark.parametrize("segments", BOUNDED.values(), ids=BOUNDED)
def test_chunks(interpreter: Interpreter, segments: tuple[tuple[int, int], ...], chunk: int) -> None:
    """A row sees keys of its own chunk, up to its own, wherever the chunk lies in a tile, a page or a prompt."""
    _assert_equal_to_oracle(interpreter, Shape(segments), chunk=chunk)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float32, {}),
        (torch.float16, {}),
        (torch.float32, {"window": 9}),
        (torch.float32, {"chunk": 20}),
        (torch.float16, {"softcap": 0.7}),
    ],
    ids=str,
)
@pytest.mark.parametrize("segments", BOUNDED.values(), ids=BOUNDED)
def test_sinks(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], bound: dict[str, Any], dtype: torch.dtype
) -> None:
    """Sinks take their part of every row, whether they are small, large, or all there is, beside any bound."""
    sinks = torch.tensor([-30.0, 0.0, 4.0, 90.0]).to(dtype)
    _assert_equal_to_oracle(interpreter, Shape(segments, dtype=dtype), sinks=sinks, **bound)


@pytest.mark.parametrize("chunk", [None, SPLIT_KEYS + 20])
def test_sinks_of_rows_that_are_split(interpreter: Interpreter, chunk: int | None) -> None:
    """The sink enters once, when the splits are joined; a row of one split has the bits that it has alone."""
    segments, sinks = ((1, 3 * SPLIT_KEYS + 100), (1, 5)), torch.tensor([0.5, 3.0])
    _assert_equal_to_oracle(interpreter, Shape(segments, heads=2, kv_heads=1), sinks=sinks, chunk=chunk)
    together = make_batch(Shape(((1, 5), (1, 700)), heads=2, kv_heads=1))
    paged = together.paged
    alone = Batch(
        together.q[:1],
        together.k_pool,
        together.v_pool,
        type(paged)(paged.cu_rows[:2], paged.context[:1], paged.page_table[:1], max_rows=1, max_length=6),
    )
    settings = _settings(16, sinks=sinks, chunk=chunk)

    assert torch.equal(_run(interpreter, together, settings)[:1], _run(interpreter, alone, settings))


@pytest.mark.parametrize("context", [SPLIT_KEYS - 1, SPLIT_KEYS, 3 * SPLIT_KEYS + 100])
def test_long_contexts_are_split_and_joined(interpreter: Interpreter, context: int) -> None:
    """Around the edges of a split, and over several, the joined result equals the oracle."""
    segments = ((1, context), (1, 5))
    _assert_equal_to_oracle(interpreter, Shape(segments, heads=2, kv_heads=1))
    _assert_equal_to_oracle(interpreter, Shape(segments, heads=2, kv_heads=1), window=SPLIT_KEYS + 20)


def test_beyond_the_most_splits_they_grow(interpreter: Interpreter) -> None:
    """A context longer than MAX_SPLITS splits of the usual size is still seen whole."""
    context = MAX_SPLITS * SPLIT_KEYS + 77
    _assert_equal_to_oracle(interpreter, Shape(((1, context),), heads=1, kv_heads=1))


def test_a_row_does_not_depend_on_its_neighbours(interpreter: Interpreter) -> None:
    """A decode row's output is the same to the bit alone, and beside rows that are longer or are prompts."""
    together = make_batch(Shape(((1, 700), (1, 2000), (30, 4)), heads=2, kv_heads=1))
    alone = Batch(
        together.q[:1],
        together.k_pool,
        together.v_pool,
        type(together.paged)(
            cu_rows=torch.tensor([0, 1], dtype=torch.int32),
            context=together.paged.context[:1],
            page_table=together.paged.page_table[:1],
            max_rows=1,
            max_length=701,
        ),
    )

    settings = _settings(16)

    assert torch.equal(_run(interpreter, together, settings)[:1], _run(interpreter, alone, settings))
