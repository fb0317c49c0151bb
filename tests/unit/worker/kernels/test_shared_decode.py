"""Splits that decode rows share: the same output as without sharing, and no key read that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import PagedTensors, Segment, paged_tensors
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.interpreted import Interpreter
from tests.unit.worker.kernels.paged_batches import TABLES

PAGE_SIZE, HEAD_DIM = 16, 16


def _batch(groups: list[tuple[int, list[int]]], heads: int, kv_heads: int, dtype: torch.dtype, chunk: int) -> Any:
    """Q, pools and tables of decode rows: for each group its shared tokens, and the own tokens of its members. Then a
    chunk of a prompt. Slots that are nobody's hold NaN.
    """
    random = torch.Generator().manual_seed(0)
    taken, segments, used = 0, [], []
    for shared, own in groups:
        common = np.arange(taken, taken + shared // PAGE_SIZE, dtype=np.int32)
        taken += len(common)
        used += [(page, PAGE_SIZE) for page in common]
        for tokens in own:
            pages = np.arange(taken, taken + tokens // PAGE_SIZE + 1, dtype=np.int32)
            taken += len(pages)
            segments.append(Segment(1, shared + tokens, np.append(common, pages)))
            used += [(page, PAGE_SIZE) for page in pages[:-1]] + [(pages[-1], tokens % PAGE_SIZE + 1)]
    if chunk:
        pages = np.arange(taken, taken + -(-chunk // PAGE_SIZE), dtype=np.int32)
        taken += len(pages)
        segments.append(Segment(chunk, 0, pages))
        used += [(page, min(PAGE_SIZE, chunk - at * PAGE_SIZE)) for at, page in enumerate(pages)]
    pools = []
    for _ in range(2):
        pool = torch.full((taken, PAGE_SIZE, kv_heads, HEAD_DIM), float("nan"))
        for page, slots in used:
            pool[page, :slots] = torch.randn(slots, kv_heads, HEAD_DIM, generator=random)
        pools.append(pool.to(dtype))
    total = sum(segment.rows for segment in segments)
    q = torch.randn(total, heads, HEAD_DIM, generator=random).to(dtype)
    paged = paged_tensors(segments, PAGE_SIZE, torch.device("cpu"))
    return {"q": q, "k_pool": pools[0], "v_pool": pools[1]}, paged


def _attend(interpreter: Interpreter, tensors: dict[str, torch.Tensor], paged: PagedTensors, softcap: float | None,
            window: int | None = None) -> torch.Tensor:  # fmt: skip
    tables = {name: getattr(paged, name) for name in TABLES}
    if paged.shared is not None:
        tables |= {name: getattr(paged.shared, name) for name in ("row_keys", "tile_rows", "tile_keys")}
    settings = {"scaling": 0.25, "window": window, "softcap": softcap}
    return interpreter.paged_attention(tensors, tables, settings)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(4, 1, torch.float32), (4, 1, torch.float16), (3, 3, torch.float32), (80, 1, torch.float32)],
    ids=str,
)
def test_shared_splits_equal_the_oracle(
    interpreter: Interpreter, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Two documents, one under more rows than a tile has, beside a row alone and a chunk of a prompt."""
    many = 18 if heads < 10 else 5
    tensors, paged = _batch([(1040, [3 * at for at in range(many)]), (2064, [5, 700, 0]), (0, [40])], heads, kv_heads,
                            dtype, chunk=9)  # fmt: skip
    assert paged.shared is not None

    found = _attend(interpreter, tensors, paged, None)

    expected = oracles.paged_attention(tensors["q"], tensors["k_pool"], tensors["v_pool"], paged, scaling=0.25)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_sharing_is_used_and_changes_no_sum(interpreter: Interpreter) -> None:
    """Without the tiles' kernel the rows would lack those keys; with it they are as near as rounding allows."""
    tensors, paged = _batch([(2064, [5, 700, 0, 16])], 4, 1, torch.float32, chunk=0)
    assert paged.shared is not None
    emptied = replace(paged, shared=replace(paged.shared, tile_keys=torch.zeros_like(paged.shared.tile_keys)))

    shared, alone = (_attend(interpreter, tensors, each, 20.0) for each in (paged, replace(paged, shared=None)))
    without = _attend(interpreter, tensors, emptied, 20.0)

    torch.testing.assert_close(shared, alone, atol=2e-6, rtol=2e-6)
    assert not torch.allclose(without, alone, atol=1e-3)


def test_windows_share_nothing(interpreter: Interpreter) -> None:
    """Where rows see other keys of the same pages, each attends by itself."""
    tensors, paged = _batch([(2064, [5, 700, 0])], 2, 1, torch.float32, chunk=0)

    found = _attend(interpreter, tensors, paged, None, window=1500)

    expected = oracles.paged_attention(
        tensors["q"], tensors["k_pool"], tensors["v_pool"], paged, scaling=0.25, window=1500
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
