"""Layers over strips of weights compute what torch's compute, and a row never depends on what is beside it."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
import torch

from services.worker.engine.fused.strips import StripEmbedding, StripLinear, StripMemory, StripNorm
from services.worker.native import fused
from services.worker.native.fused import FusedKernels
from shared.errors import InvariantViolated
from tests.cases import case
from tests.unit.worker.torch_threads import torch_threads

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of a sum in another order, relative to the largest value."""


def linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(outputs + inputs)
    return torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def packed(layer: torch.nn.Linear, compiled: FusedKernels | None = None) -> StripLinear:
    memory = StripMemory([(layer.weight.shape[0], layer.weight.shape[1])], layer.weight.dtype)
    compiled = compiled or FusedKernels(layer.weight.dtype)
    return StripLinear(compiled, memory.pack([layer.weight]), layer.bias, layer.out_features)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = max(expected.abs().flatten().tolist(), default=0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING[found.dtype] * largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (48, 64), (300, 192), (112, 96)])
def test_layers_equal_torchs(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """For every height of a tile, widths that leave strips over, and a last strip that is not full."""
    layer = linear(outputs, inputs, dtype)
    bias = None if outputs % 16 else layer.bias
    memory = StripMemory([(outputs, inputs)], dtype)
    ours = StripLinear(FusedKernels(dtype), memory.pack([layer.weight]), bias, outputs)
    for rows in (0, 1, 2, 5, 6, 7, 12, 13, 40, 97, 250):
        x = torch.randn(rows, inputs).to(dtype)

        found = ours(x[None])[0]

        with case(rows=rows):
            assert found.shape == (rows, outputs)
            assert_near(found, torch.nn.functional.linear(x, layer.weight, bias))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, threads: int) -> None:
    """Alone, with few and with many others, wherever among them, whatever thread or tile has it."""
    ours = packed(linear(272, 192, dtype))
    x = torch.randn(400, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([ours(x[row : row + 1]) for row in range(len(x))])
    with torch_threads(threads):
        for first, rows in [(0, 1), (0, 2), (3, 6), (7, 7), (1, 11), (5, 32), (0, 95), (9, 97), (4, 143), (0, 400)]:
            assert torch.equal(ours(x[first : first + rows]), alone[first : first + rows]), (first, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_merged_matrix_give_its_bits(dtype: torch.dtype) -> None:
    """Layers that were merged are still there one by one, in the same memory."""
    layers = [linear(outputs, 64, dtype, bias=False) for outputs in (64, 32, 16)]
    compiled, memory = FusedKernels(dtype), StripMemory([(112, 64)], dtype)
    merged = memory.pack([layer.weight for layer in layers])
    x = torch.randn(9, 64).to(dtype)

    whole = StripLinear(compiled, merged)(x)
    parts = [StripLinear(compiled, merged.part(first, end - first))(x) for first, end in ((0, 64), (64, 96), (96, 112))]

    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert_near(parts[1], layers[1](x))


def test_memory_holds_what_it_was_taken_for() -> None:
    """And nothing more."""
    memory = StripMemory([(30, 8)], torch.float32)
    memory.pack([torch.ones(30, 8)])

    with pytest.raises(InvariantViolated, match="no room"):
        memory.pack([torch.ones(1, 8)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_gives_the_rows_of_the_head(dtype: torch.dtype) -> None:
    """Unchanged, and refuses tokens that do not exist."""
    head = linear(300, 64, dtype, bias=False)
    compiled, memory = FusedKernels(dtype), StripMemory([(300, 64)], dtype)
    embedding = StripEmbedding(compiled, memory.pack([head.weight]), 300)
    ids = torch.tensor([[0, 299, 17], [17, 16, 15]])

    assert torch.equal(embedding(ids), head.weight[ids])
    for wrong in (-1, 300, 303):
        with pytest.raises(InvariantViolated, match="token"):
            embedding(torch.tensor([3, wrong]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_equals_torchs(dtype: torch.dtype) -> None:
    """Rounded before it is scaled, as Hugging Face's modules do; zeros stay zeros, NaN stays in its row."""
    weight, x = torch.randn(48).to(dtype), (torch.randn(130, 3, 48) * 5).to(dtype)
    x[7, 1], x[8, 2, 5] = 0, float("nan")

    found = StripNorm(FusedKernels(dtype), weight, 1e-6)(x)

    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=1e-6, equal_nan=True)
    assert found[8, 2].isnan().all()
    assert not found[8, :2].isnan().any()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_c_computes_the_same_as_special_instructions(
    dtype: torch.dtype, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, on processors without them, where rows are as independent of one another."""
    if processor == "x86-64-v4" and "avx512vl" not in processor_flags():
        pytest.skip("this processor cannot run it")
    layer = linear(64, 96, dtype)
    x = torch.randn(25, 96).to(dtype)
    monkeypatch.setattr(fused, "_FLAGS", [*fused._FLAGS, f"-march={processor}"])
    plain = packed(layer, FusedKernels(dtype))

    found = plain(x)

    assert_near(found, layer(x))
    assert torch.equal(torch.cat([plain(row[None]) for row in x]), found)


def processor_flags() -> str:
    """Of the first processor, with spaces between."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith("flags")), "")
