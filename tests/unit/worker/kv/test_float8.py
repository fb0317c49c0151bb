"""K and V rounded to eight bits: what is kept of a head, in torch and as the compiled kernels write it."""

from __future__ import annotations

import math

import pytest
import torch

from services.worker.kv.float8 import from_float8, rounded, to_float8
from shared.messages.pools import FLOAT8, KvGeometry, scale_offset


def heads(head_dim: int = 20) -> torch.Tensor:
    """Heads of all sizes that float32 has, with zeros among them, float32 [heads, head_dim]."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([10.0**power for power in range(-30, 31, 3)])
    values = torch.randn(len(sizes), head_dim, generator=generator) * sizes[:, None]
    values[3, 2:5], values[4] = 0.0, 0.0
    values[5, 0], values[6] = 448.0 * 2.0**-3, torch.linspace(-7.0, 7.0, head_dim)
    return values


@pytest.mark.parametrize("head_dim", [1, 20, 64, 129])
def test_a_rounded_head_takes_what_its_geometry_says(head_dim: int) -> None:
    """One byte a value, up to three that align, and four of the scale."""
    geometry = KvGeometry(layers=2, kv_heads=3, head_dim=head_dim, page_size=4, dtype=FLOAT8)

    kept = to_float8(torch.ones(head_dim))

    assert kept.shape[-1] == geometry.head_bytes == math.ceil(head_dim / 4) * 4 + 4
    assert geometry.token_bytes == 2 * 2 * 3 * geometry.head_bytes


def test_values_are_within_half_a_step_of_four_bits() -> None:
    """A value that is not tiny beside the largest of its head is at most a sixteenth off."""
    values = heads()

    error = (rounded(values) - values).abs()

    large = values.abs() >= values.abs().amax(-1, keepdim=True) / 2**14
    assert (error[large] <= values.abs()[large] / 16).all()
    assert (error <= values.abs().amax(-1, keepdim=True) / 16).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_again_changes_nothing(dtype: torch.dtype) -> None:
    """What a pool gives back is kept as it was, in either type, and both types stand for the same numbers."""
    kept = to_float8(heads())

    values = from_float8(kept, 20, dtype)

    assert torch.equal(values.float(), from_float8(kept, 20, torch.float32))
    assert torch.equal(from_float8(to_float8(values), 20, dtype), values)


def test_the_scale_is_the_smallest_power_of_two_that_leaves_no_value_out() -> None:
    """So the largest code of a head is above half of 448, and at most that."""
    values = heads()[torch.arange(len(heads())) != 4]

    kept = to_float8(values)

    largest = kept[:, :20].contiguous().view(torch.float8_e4m3fn).float().abs().amax(-1)
    assert ((largest > 208) & (largest <= 448)).all()
    scale = kept[:, scale_offset(20) :].contiguous().view(torch.float32)
    assert (torch.frexp(scale)[0] == 0.5).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_nan_altogether(odd: float) -> None:
    """A number that is none is never hidden behind a code; its neighbours keep theirs."""
    values = heads()
    values[7, 3] = odd

    found = rounded(values)

    assert found[7].isnan().all()
    assert found[torch.arange(len(values)) != 7].isfinite().all()
