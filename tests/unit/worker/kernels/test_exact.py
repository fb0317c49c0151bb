"""Exact kernels: a row has the same bits alone, in any batch, in any chunk, in Triton's interpreter.

That the compiled kernels add in the same order whatever the batch is follows from one variant of each serving all steps
(``test_exact_variants.py``); no interpreter shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.worker.kernels import exact_scenarios, oracles
from tests.unit.worker.kernels.interpreted import Interpreter, running_interpreter
from tests.unit.worker.kernels.ordered_dot import order_products
from tests.unit.worker.kernels.paged_batches import Shape, make_batch


@pytest.fixture(scope="module")
def ordered() -> Iterator[Interpreter]:
    with running_interpreter() as running:
        running.call(order_products)
        yield running


@pytest.mark.parametrize("dtype", exact_scenarios.DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap", "group"), [(None, None, 2), (100, None, 1), (150, 20.0, 3)], ids=["full", "narrow", "wide"]
)
def test_attention_has_the_same_bits(
    ordered: Interpreter, dtype: str, window: int | None, softcap: float | None, group: int
) -> None:
    """Whole prompts, chunks and single rows agree, beside others and alone, over cached and computed keys."""
    assert ordered.call(exact_scenarios.attention, dtype, window, softcap, group) == []


@pytest.mark.parametrize("dtype", exact_scenarios.DTYPES)
@pytest.mark.parametrize("chunk", [None, 150])
def test_attention_with_sinks_has_the_same_bits(ordered: Interpreter, dtype: str, chunk: int | None) -> None:
    """In chunks and without."""
    function = functools.partial(exact_scenarios.attention, chunk=chunk, has_sinks=True)

    assert ordered.call(function, dtype, None, None, 2) == []


@pytest.mark.parametrize(
    ("dtype", "depth", "columns"),
    [*((dtype, 100, 70) for dtype in exact_scenarios.DTYPES), ("float32", 16, 16_400)],
)
def test_products_have_the_same_bits(ordered: Interpreter, dtype: str, depth: int, columns: int) -> None:
    """Rows alone and in pieces, as rows and as columns."""
    rows = 70 if columns < 1000 else 2

    assert ordered.call(exact_scenarios.products, dtype, rows, depth, columns) == []


@pytest.mark.parametrize("dtype", exact_scenarios.DTYPES)
@pytest.mark.parametrize("width", [16, 100, 2500])
def test_reductions_have_the_same_bits(ordered: Interpreter, dtype: str, width: int) -> None:
    """Of rows shorter and longer than a block."""
    assert ordered.call(exact_scenarios.reductions, dtype, width) == []


def test_these_tests_can_fail(ordered: Interpreter) -> None:
    """Work that is divided by the number of rows, as kernels do for speed, gives other bits, and is found out."""
    attention = ordered.call(exact_scenarios.attention, "float32", None, None, 2, "splits by rows")
    products = ordered.call(exact_scenarios.products, "float32", 70, 100, 70, "split k")
    reductions = ordered.call(exact_scenarios.reductions, "float32", 100, "threads by rows")

    assert "rows alone" in attention
    assert "alone" in products
    assert reductions == ["mean"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 33, 1100])
@pytest.mark.parametrize("segments", [((1, 40), (19, 5), (1, 3), (70, 0), (1, 0)), ((1, 2100), (5, 1020))], ids=str)
def test_attention_equals_the_oracle(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], window: int | None, dtype: torch.dtype
) -> None:
    """Mixed steps, single rows and contexts of several splits, with and without windows."""
    batch = make_batch(Shape(segments, dtype=dtype))
    settings: dict[str, Any] = {"scaling": 0.25, "window": window, "softcap": None}

    found = interpreter.exact_attention(batch.tensors, batch.tables, settings)

    expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bound", [{}, {"window": 33}, {"chunk": 33}, {"chunk": 1100}], ids=str)
@pytest.mark.parametrize("segments", [((1, 40), (19, 5), (70, 0), (1, 0)), ((1, 2100), (5, 1020))], ids=str)
def test_sinks_and_chunks_equal_the_oracle(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], bound: dict[str, Any]
) -> None:
    """A sink enters once, in rows of one split and of several; a chunk may begin within a split."""
    batch = make_batch(Shape(segments))
    settings: dict[str, Any] = {"scaling": 0.25, "sinks": torch.tensor([-30.0, 0.0, 4.0, 90.0]), **bound}

    found = interpreter.exact_attention(batch.tensors, batch.tables, settings)

    expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("change", [{"heads": 72, "kv_heads": 1}, {"head_dim": 80}, {"page_size": 1}], ids=str)
def test_attention_of_other_shapes(interpreter: Interpreter, change: dict[str, Any]) -> None:
    """Groups larger than a tile, head dimensions that are no power of two, pages of one token."""
    batch = make_batch(Shape(((1, 37), (20, 9)), **change))
    settings: dict[str, Any] = {"scaling": 0.25, "window": None, "softcap": 0.7}

    found = interpreter.exact_attention(batch.tensors, batch.tables, settings)

    expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
