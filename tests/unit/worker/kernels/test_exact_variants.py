"""One compiled variant of each exact kernel serves steps of every shape: the same instructions, so the same order."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.forward_meta import PagedTensors
from services.worker.kernels.exact import paged_attention, rows
from services.worker.kernels.exact.attention import exact_attention_kernel, exact_join_kernel
from services.worker.kernels.exact.matmul import matmul, matmul_kernel, product, tile_for
from services.worker.kernels.exact.rows import layer_norm_kernel, log_softmax_kernel, mean_kernel
from tests.unit.worker.kernels.launches import note_variants

KERNELS = (
    exact_attention_kernel, exact_join_kernel, matmul_kernel, mean_kernel, layer_norm_kernel, log_softmax_kernel
)  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Variants that launches ask for, by kernel; nothing is launched."""
    found: dict[str, set[str]] = {}
    note_variants(monkeypatch, KERNELS, lambda name, variant: found.setdefault(name, set()).add(variant))
    return found


def _attend(*segments: tuple[int, int], window: int | None = None) -> None:
    total = sum(count for count, _ in segments)
    pool = torch.empty((4, 16, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    longest = max(count + context for count, context in segments)
    paged = PagedTensors(
        cu_rows=torch.zeros(len(segments) + 1, dtype=torch.int32),
        context=torch.zeros(len(segments), dtype=torch.int32),
        page_table=torch.zeros((len(segments), -(-longest // 16)), dtype=torch.int32),
        max_rows=max(count for count, _ in segments),
        max_length=longest,
    )
    for q in (
        torch.empty((total, HEADS, HEAD_DIM), dtype=torch.bfloat16),
        torch.empty((HEADS, total, HEAD_DIM), dtype=torch.bfloat16).transpose(0, 1),
    ):
        paged_attention(q, pool, pool, paged, scaling=0.125, window=window)


def test_attention_has_one_variant(seen: dict[str, set[str]]) -> None:
    """For single rows and chunks, short and long contexts, alone and together, and either layout of the queries."""
    for length in (1, 2, 15, 16, 17, 64, 1024, 1025, 2048, 40_000):
        _attend((1, length - 1))
        _attend((length, 0))
        _attend((1, length - 1), (length, 7), (1, 0))

    assert {name: len(variants) for name, variants in seen.items()} == {
        "exact_attention_kernel": 1, "exact_join_kernel": 1,
    }  # fmt: skip


def test_products_have_one_variant(seen: dict[str, set[str]]) -> None:
    """For any number of rows, also of rows that are views of something larger."""
    weight, bias = torch.empty((96, 64), dtype=torch.bfloat16), torch.empty(96, dtype=torch.bfloat16)
    for count in (1, 2, 3, 16, 17, 64, 65, 1000):
        matmul(torch.empty((count, 64), dtype=torch.bfloat16), weight, bias)
        matmul(torch.empty((1, count, 64), dtype=torch.bfloat16)[0], weight, bias)
        matmul(torch.empty((count + 3, 64), dtype=torch.bfloat16)[3:], weight, bias)

    assert len(seen["matmul_kernel"]) == 1


def test_reductions_have_one_variant_each(seen: dict[str, set[str]]) -> None:
    """For any number of rows."""
    weight = torch.empty(64, dtype=torch.bfloat16)
    for count in (1, 2, 16, 17, 1000):
        x = torch.empty((count, 64), dtype=torch.bfloat16)
        rows.mean(x)
        rows.layer_norm(x, weight, weight, 1e-5)
        rows.log_softmax(x, torch.float32)

    assert {name: len(variants) for name, variants in seen.items()} == {
        "mean_kernel": 1, "layer_norm_kernel": 1, "log_softmax_kernel": 1,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiles_know_nothing_of_rows(seen: dict[str, set[str]], dtype: torch.dtype) -> None:
    """A product whose operands may be either way round has one tile for all shapes; a weight's goes by its own rows."""
    for count, columns in ((1, 40_000), (40_000, 1), (64, 64)):
        product(torch.empty((1, count, 64), dtype=dtype), torch.empty((1, 64, columns), dtype=dtype))
    tiles = {tuple(part for part in variant.split("'BLOCK_")[1:]) for variant in seen["matmul_kernel"]}

    assert len(tiles) == 1
    assert tile_for(dtype, 20_000) != tile_for(dtype) or dtype == torch.float32
