"""Writing new K and V into their slots."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.interpreted import Interpreter


@pytest.mark.parametrize(("kv_heads", "head_dim", "page_size"), [(1, 16, 1), (3, 80, 16), (4, 256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_reach_their_slots_and_no_others(
    interpreter: Interpreter, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    """Every row is in its slot to the bit, padding is nowhere, and the rest of the pool is as it was."""
    random = torch.Generator().manual_seed(head_dim)
    pages, rows = 128 // page_size + 1, 9
    # Models hand over K and V as [kv_heads, T, head_dim], transposed.
    k, v = (torch.randn(kv_heads, rows, head_dim, generator=random).to(dtype).transpose(0, 1) for _ in range(2))
    pools = [torch.randn(pages, page_size, kv_heads, head_dim, generator=random).to(dtype) for _ in range(2)]
    slots = torch.randperm(pages * page_size, generator=random)[:rows]
    slots[4] = -1
    expected = [pool.clone() for pool in pools]
    oracles.kv_write(k, v, expected[0], expected[1], slots)

    actual = interpreter.kv_write({"k": k, "v": v, "k_pool": pools[0], "v_pool": pools[1], "slots": slots})

    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert not torch.equal(actual[0], pools[0])
