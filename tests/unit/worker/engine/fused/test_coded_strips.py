"""Layers over codes compute what the dequantised weights say, and a row never depends on what is beside it."""

from __future__ import annotations

import platform
import shutil
from itertools import product

import pytest
import torch

from services.worker.engine.fused.coded_strips import CodedMemory, coded_bytes, mergeable
from services.worker.engine.fused.strips import StripLinear
from services.worker.engine.quantised.codes import Codes, attach
from services.worker.native import fused
from services.worker.native.fused import FusedKernels
from shared.errors import InvariantViolated
from tests.cases import case
from tests.unit.worker.engine.fused.test_strips import DTYPES, processor_flags
from tests.unit.worker.torch_threads import torch_threads

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of a sum in another order, and of its result in this type, relative to the largest value."""


def codes_like(outputs: int, inputs: int, bits: int, group: int, scales: torch.dtype, *, offsets: bool) -> Codes:
    draw = torch.Generator().manual_seed(outputs + inputs + bits + group)
    most = 1 << bits - 1
    shape = outputs, inputs // group
    return Codes(
        bits,
        torch.randint(-most, most, (outputs, inputs), dtype=torch.int8, generator=draw),
        (torch.rand(shape, generator=draw) * 0.1 + 0.001).to(scales),
        torch.randint(-most, most, shape, dtype=torch.int8, generator=draw) if offsets else None,
    )


def packed(parts: list[Codes], dtype: torch.dtype, kernels: FusedKernels | None = None) -> StripLinear:
    matrix = CodedMemory(coded_bytes(parts), dtype).pack(parts)
    return StripLinear(
        kernels or FusedKernels(dtype, has_codes=True), matrix, outputs=sum(codes.outputs for codes in parts)
    )


def exact(parts: list[Codes], x: torch.Tensor) -> torch.Tensor:
    """In double precision, of weights that were not rounded."""
    return torch.cat([x.double() @ _weight(codes).T for codes in parts], dim=1)


def _weight(codes: Codes) -> torch.Tensor:
    wide = codes.values.double().view(codes.outputs, -1, codes.group)
    if codes.offsets is not None:
        wide = wide - codes.offsets.double()[:, :, None]
    return (wide * codes.scales.double()[:, :, None]).view(codes.values.shape)


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, rounding: float | None = None) -> None:
    most = expected.abs().max().item()
    bound = (rounding or ROUNDING[found.dtype]) * most
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_equal_the_dequantised_weights(dtype: torch.dtype, bits: int) -> None:
    """For groups of every kind, scales of every type, merged parts of which one has offsets, and a last part that fills
    no strip.
    """
    for group, scales, has_offsets in product((16, 32, 96, 384), fused.SCALE_FORMS, (False, True)):
        parts = [codes_like(outputs, 384, bits, group, scales, offsets=has_offsets and outputs == 48)
                 for outputs in (32, 48, 20)]  # fmt: skip
        ours = packed(parts, dtype)
        for rows in (1, 2, 3, 5, 6, 7, 13, 97):
            x = torch.randn(rows, 384).to(dtype)

            with case(group=group, scales=scales, has_offsets=has_offsets, rows=rows):
                assert_near(ours(x), exact(parts, x))


def test_values_of_every_code_are_exact() -> None:
    """Weights of powers of two times codes come back one by one, the least and the greatest code too."""
    for bits, dtype in product((4, 8), DTYPES):
        most = 1 << bits - 1
        values = torch.arange(-most, most, dtype=torch.int8).repeat(16, 256 // (2 * most))
        scales = torch.full((16, 2), 0.5)
        ours = packed([Codes(bits, values, scales)], dtype)

        found = ours(torch.eye(256, dtype=dtype))

        assert torch.equal(found.T.float(), values.float() / 2)


def test_scales_of_sixteen_bits_are_exact() -> None:
    """Subnormal ones, too."""
    for scales in (torch.float16, torch.bfloat16):
        numbers = torch.tensor([2.0**-24, 2.0**-15, 6.1e-5, 0.1, 1.0, 65504.0] * 8).to(scales)[:48, None]
        values = torch.zeros(48, 16, dtype=torch.int8)
        values[:, 0] = 1
        x = torch.zeros(1, 16)
        x[0, 0] = 1

        found = packed([Codes(8, values, numbers)], torch.float32)(x)

        assert torch.equal(found[0], numbers[:, 0].float())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, bits: int, threads: int) -> None:
    """Alone, with few and with many others, wherever among them, whatever thread or tile has it."""
    ours = packed([codes_like(272, 192, bits, 64, torch.float16, offsets=True)], dtype)
    x = torch.randn(250, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([ours(x[row : row + 1]) for row in range(len(x))])
    with torch_threads(threads):
        for first, rows in [(0, 1), (0, 2), (3, 6), (7, 7), (1, 11), (5, 32), (0, 95), (9, 97), (4, 143), (0, 250)]:
            assert torch.equal(ours(x[first : first + rows]), alone[first : first + rows]), (first, rows)


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_of_all_sizes_are_computed(bits: int) -> None:
    """A block may hold outliers, nothing, or numbers near the ends of the type; what is no number stays in its row."""
    parts = [codes_like(48, 256, bits, 128, torch.float32, offsets=True)]
    ours = packed(parts, torch.bfloat16)
    x = torch.randn(8, 256)
    x[0, 3] = 2000.0
    x[1] = 0
    x[2] *= 1e-38
    x[3] *= 1e30
    x[4, :128] = 0
    x[5, 200] = float("nan")
    x[6, 7] = float("inf")
    x = x.to(torch.bfloat16)

    found = ours(x)

    for row in (0, 1, 3, 4, 7):
        assert_near(found[row], exact(parts, x[row : row + 1])[0])
    assert found[2].abs().max() < 1e-30
    assert found[5].isnan().all()
    assert not found[6].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_merged_matrix_give_its_bits(dtype: torch.dtype) -> None:
    """Layers that were merged are still there one by one, in the same memory."""
    for bits in (4, 8):
        parts = [codes_like(outputs, 64, bits, 32, torch.float16, offsets=outputs == 32) for outputs in (64, 32, 16)]
        kernels = FusedKernels(dtype, has_codes=True)
        merged = CodedMemory(coded_bytes(parts), dtype).pack(parts)
        x = torch.randn(9, 64).to(dtype)

        whole = StripLinear(kernels, merged)(x)
        ends = ((0, 64), (64, 96), (96, 112))
        found = [StripLinear(kernels, merged.part(first, end - first))(x) for first, end in ends]

        assert torch.equal(torch.cat(found, dim=1), whole)


def test_memory_holds_what_it_was_taken_for() -> None:
    """And it is as little as codes, scales and offsets take."""
    parts = [codes_like(32, 128, 4, 32, torch.float16, offsets=False)]
    memory = CodedMemory(coded_bytes(parts), torch.float32)
    memory.pack(parts)

    assert coded_bytes(parts) == 32 * 128 // 2 + 32 * 4 * 2
    with pytest.raises(InvariantViolated, match="no room"):
        memory.pack(parts)


def test_layers_merge_where_their_codes_are_alike() -> None:
    """Of the same bits, groups and type of scales, and only where kernels have such groups."""

    def layer(bits: int = 4, group: int = 32, scales: torch.dtype = torch.float16) -> torch.nn.Linear:
        module = torch.nn.Linear(96, 16)
        attach(module, codes_like(16, 96, bits, group, scales, offsets=False))
        return module

    assert mergeable([layer(), layer()]) is not None
    for other in (layer(8), layer(group=96), layer(scales=torch.float32), torch.nn.Linear(96, 16)):
        assert mergeable([layer(), other]) is None
    assert mergeable([layer(group=24)]) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one kind")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4", "icelake-server", "cascadelake"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_c_computes_the_same_as_special_instructions(
    dtype: torch.dtype, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, on processors without them, where rows are as independent of one another."""
    needed = {"x86-64-v4": "avx512vl", "icelake-server": "avx512_vbmi2", "cascadelake": "avx512_vnni"}
    if needed.get(processor, "") not in processor_flags():
        pytest.skip("this processor cannot run it")
    monkeypatch.setattr(fused, "_FLAGS", [*fused._FLAGS, f"-march={processor}"])
    for bits in (4, 8):
        parts = [codes_like(64, 96, bits, 32, torch.float16, offsets=True)]
        x = torch.randn(25, 96).to(dtype)
        plain = packed(parts, dtype, FusedKernels(dtype, has_codes=True))

        found = plain(x)

        assert_near(found, exact(parts, x))
        assert torch.equal(torch.cat([plain(row[None]) for row in x]), found)
