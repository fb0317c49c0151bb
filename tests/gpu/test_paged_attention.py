"""The attention kernels on a GPU, bf16 too."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.key_splits import SPLIT_KEYS
from services.worker.kernels import kv_write, paged_attention
from tests.cases import case
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.paged_batches import Shape, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SEGMENTS = {
    "decode": ((1, 0), (1, 511), (1, 4 * SPLIT_KEYS + 3)),
    "prompt": ((300, 0), (17, 0)),
    "mixed": ((1, 900), (130, 600), (1, 2), (64, 0)),
}
SHAPES = [(64, 8, 8, 16), (80, 4, 2, 1), (128, 32, 8, 16), (256, 8, 4, 64), (128, 24, 1, 32)]
"""Width of a head, heads, KV heads, tokens of a page."""
MASKS = [(None, None), (100, None), (None, 30.0), (700, 50.0)]
"""Window and soft-cap."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_the_kernels_equal_the_oracle(dtype: torch.dtype, segments: tuple[tuple[int, int], ...]) -> None:
    """For every dtype, shape, window and soft-cap, decode and extend equal the fp32 oracle."""
    for head_dim, heads, kv_heads, page_size in SHAPES:
        shape = Shape(segments, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
        batch = make_batch(shape, device="cuda")
        for window, softcap in MASKS:
            settings = {"scaling": head_dim**-0.5, "window": window, "softcap": softcap}

            actual = paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)

            expected = oracles.paged_attention(batch.q, batch.k_pool, batch.v_pool, batch.paged, **settings)
            with case(shape=shape, window=window, softcap=softcap):
                torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_reach_their_slots(dtype: torch.dtype) -> None:
    """kv_write puts every row into its slot to the bit and touches no other."""
    k, v = (torch.randn(50, 4, 80, device="cuda").to(dtype) for _ in range(2))
    pools = [torch.randn(9, 16, 4, 80, device="cuda").to(dtype) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    slots = torch.randperm(9 * 16, device="cuda")[:50]
    oracles.kv_write(k, v, expected[0], expected[1], slots)

    kv_write(k, v, pools[0], pools[1], slots)

    assert torch.equal(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])
