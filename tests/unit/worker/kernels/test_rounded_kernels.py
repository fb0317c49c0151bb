"""The kernels over K and V of eight bits, in Triton's interpreter, against what torch keeps of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.worker.kv.float8 import from_float8, to_float8
from tests.unit.worker.kernels import oracles, step_cases
from tests.unit.worker.kernels.interpreted import Interpreter
from tests.unit.worker.kernels.paged_batches import Shape, make_batch
from tests.unit.worker.kernels.test_paged_attention import BATCHES, TOLERANCE
from tests.unit.worker.kv.test_float8 import heads


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_attention_is_over_what_rounded_pages_stand_for(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], page_size: int
) -> None:
    """Decode rows, prompts and chunks, over pages whose other slots are NaN."""
    _assert_equal_to_oracle(interpreter, Shape(segments, page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 66, 128])
def test_every_head_dim(interpreter: Interpreter, head_dim: int, dtype: torch.dtype) -> None:
    """Also one that is no multiple of four, whose scale lies two bytes behind its codes."""
    _assert_equal_to_oracle(interpreter, Shape(((1, 37), (20, 9)), head_dim=head_dim, dtype=dtype))


def _assert_equal_to_oracle(interpreter: Interpreter, shape: Shape) -> None:
    batch = make_batch(shape)
    kept = replace(batch, k_pool=to_float8(batch.k_pool), v_pool=to_float8(batch.v_pool))
    settings = {"scaling": shape.head_dim**-0.5, "window": None, "softcap": None}

    actual = interpreter.paged_attention(kept.tensors, kept.tables, settings)

    key, value = (from_float8(pool, shape.head_dim, shape.dtype) for pool in (kept.k_pool, kept.v_pool))
    expected = oracles.paged_attention(batch.q, key, value, batch.paged, **settings)
    assert actual.dtype == shape.dtype
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_rows_are_written_as_torch_keeps_them(interpreter: Interpreter, head_dim: int, dtype: torch.dtype) -> None:
    """To the bit, at every size that the type has; padding is nowhere."""
    k = torch.stack([heads(head_dim)[:12], heads(head_dim)[3:15]], dim=1).to(dtype)
    k = torch.where(k.isfinite(), k, 1.0)
    v, slots = k.flip(0).contiguous(), torch.randperm(32, generator=torch.Generator().manual_seed(1))[:12]
    slots[4] = -1
    pools = [to_float8(torch.randn(2, 16, 2, head_dim, generator=torch.Generator().manual_seed(2))) for _ in range(2)]

    found = interpreter.kv_write({"k": k, "v": v, "k_pool": pools[0], "v_pool": pools[1], "slots": slots})

    for pool, rows, actual in zip(pools, (k, v), found, strict=True):
        expected = pool.clone()
        expected.flatten(0, 1)[slots[slots >= 0]] = to_float8(rows)[slots >= 0]
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_is_written_as_nan(interpreter: Interpreter, odd: float) -> None:
    """Its neighbours are as they were."""
    k = torch.ones(3, 2, 16)
    k[1, 0, 5] = odd
    pool = to_float8(torch.zeros(1, 16, 2, 16))

    found, _ = interpreter.kv_write(
        {"k": k, "v": k.clone(), "k_pool": pool, "v_pool": pool.clone(), "slots": torch.arange(3)}
    )

    values = from_float8(found, 16, torch.float32)[0, :3]
    assert values[1, 0].isnan().all()
    assert (values[[0, 2]] == 1).all()
    assert (values[1, 1] == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_rotated_keys_and_values_are_written_rounded(interpreter: Interpreter, head_dim: int, dtype: str) -> None:
    """What the pool has is what torch keeps of the rotated keys that stand in the step's own rows."""
    found = interpreter.call(step_cases.rope_write_rounded, (4, 2), head_dim, dtype)

    for kept, expected in found:
        assert (kept == expected).all()
