"""The kernels between two attentions round where the models do, so that bits differ only where sums do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.kernels import add_rms_norm, rope_write, silu_mul
from shared.errors import InvariantViolated
from tests.unit.worker.kernels import step_cases
from tests.unit.worker.kernels.interpreted import Interpreter

DTYPES = ["float32", "bfloat16", "float16"]
STEP = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""One rounding step of each type, relative: sums of other order may round to the neighbour."""


def assert_alike(pairs: step_cases.Pairs, dtype: str, *, steps: int = 2) -> None:
    for name, (found, expected) in pairs.items():
        assert np.isfinite(found).all(), name
        scale = np.maximum(np.abs(expected), np.abs(expected).mean())
        assert (np.abs(found - expected) <= steps * STEP[dtype] * scale).all(), name
        if dtype != "float32":  # Most numbers have the same bits: one rounding left out would move a quarter of them.
            assert (found == expected).mean() > 0.97, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1000), (2, 4096)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_a_sum_and_its_norm_are_the_modules(
    interpreter: Interpreter, rows: int, width: int, dtype: str, has_delta: bool
) -> None:
    """The sum replaces what was there, to the bit; the norm has fp32 statistics."""
    pairs = interpreter.call(step_cases.add_rms_norm, rows, width, dtype, has_delta)

    assert_alike(pairs, dtype)
    assert np.array_equal(*pairs["x"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1024), (2, 2500)])
def test_gates_open_as_the_modules_do(interpreter: Interpreter, rows: int, width: int, dtype: str) -> None:
    """In columns of more than one program, and for gates whose exponential is no number of the type."""
    assert_alike(interpreter.call(step_cases.silu_mul, rows, width, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((7, 1), 96), ((3, 3), 256), ((14, 2), 16)], ids=str)
def test_heads_are_rotated_and_written_as_the_modules_do(
    interpreter: Interpreter, heads: tuple[int, int], head_dim: int, has_norms: bool, dtype: str
) -> None:
    """Keys and values reach the first and the last slot and no others; padding is written nowhere."""
    pairs = interpreter.call(step_cases.rope_write, heads, head_dim, dtype, has_norms, True)

    assert_alike(pairs, dtype, steps=3)
    assert np.array_equal(*pairs["v_pool"])
    written = (pairs["k_pool"][0] != pairs["k_before"][0]).any(axis=(2, 3)).flatten().nonzero()[0]
    assert written.tolist() == [0, 5, 6, 11]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_norms", [True, False], ids=["normed", "plain"])
def test_without_a_pool_keys_are_rotated_in_place(interpreter: Interpreter, has_norms: bool, dtype: str) -> None:
    """For attention that keeps them; values stay."""
    pairs = interpreter.call(step_cases.rope_write, (4, 2), 32, dtype, has_norms, False)

    assert_alike(pairs, dtype, steps=3)
    assert np.array_equal(pairs["k_pool"][0], pairs["k_before"][0])


def test_what_does_not_belong_together_is_refused() -> None:
    """Before anything is launched: kernels go where they are told to."""
    x, tables, positions = torch.zeros(3, 64), torch.zeros(9, 8), torch.zeros(3, dtype=torch.int64)
    pool = torch.zeros(2, 4, 1, 16)
    heads, wide = {"heads": (2, 1), "norms": None}, {"heads": (2, 2), "norms": None}

    for refused in (
        lambda: add_rms_norm(x, None, torch.ones(32), 1e-5, x.clone()),
        lambda: add_rms_norm(x, torch.zeros(2, 64), torch.ones(64), 1e-5, x.clone()),
        lambda: add_rms_norm(x, None, torch.ones(64), 1e-5, torch.zeros(3, 128)[:, ::2]),
        lambda: silu_mul(torch.zeros(2, 7)),
        lambda: silu_mul(torch.zeros(2, 8)[:, ::2]),
        lambda: rope_write(x, positions, tables, tables, None, **wide),  # type: ignore[arg-type]
        lambda: rope_write(x, positions[:2], tables, tables, None, **heads),  # type: ignore[arg-type]
        lambda: rope_write(x, positions, tables, tables.half(), None, **heads),  # type: ignore[arg-type]
        lambda: rope_write(x, positions, tables, tables, (pool, pool.half(), positions), **heads),  # type: ignore[arg-type]
        lambda: rope_write(x, positions, tables, tables, (pool[:, :2], pool[:, :2], positions), **heads),  # type: ignore[arg-type]
        lambda: rope_write(x, positions, tables, tables, (pool, pool, positions[:1]), **heads),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvariantViolated):
            refused()
